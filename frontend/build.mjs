// Builds the modules in gpulab/views/static from src. `--check` builds in memory and fails where a committed file differs.
import { readFile, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = (path) => fileURLToPath(new URL(path, import.meta.url));
const license = await readFile(here("node_modules/uplot/LICENSE"), "utf8");
const uplot = `Contains uPlot:\n${license.trim()}\n`;
const modules = [
  { name: "live", entry: "src/index.js", holds: `gpulab live view (Apache-2.0). Built file: see frontend/. ${uplot}` },
  { name: "bench", entry: "src/bench.js", holds: `gpulab bench (Apache-2.0). Built file: see frontend/. ${uplot}` },
  { name: "stop_button", entry: "src/stop_button.js", holds: "gpulab Stop button (Apache-2.0). Built file: see frontend/. " },
];

for (const { name, entry, holds } of modules) {
  const target = here(`../gpulab/views/static/${name}.js`);
  const { outputFiles } = await build({
    absWorkingDir: here("."),
    entryPoints: [entry],
    bundle: true,
    minify: true,
    format: "esm",
    target: "es2020",
    charset: "utf8",
    loader: { ".css": "text" },
    legalComments: "none",
    banner: { js: `/*! ${holds}*/` },
    write: false,
  });
  const built = outputFiles[0].contents;
  if (process.argv.includes("--check")) {
    const committed = await readFile(target).catch(() => Buffer.alloc(0));
    if (!committed.equals(built)) {
      console.error(`static/${name}.js is not what its source builds: run \`npm ci && npm run build\` in frontend`);
      process.exit(1);
    }
  } else {
    await writeFile(target, built);
    console.log(`static/${name}.js: ${built.length} bytes`);
  }
}
