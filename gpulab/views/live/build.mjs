// Builds ../static/live.js. `--check` builds in memory and fails where the committed file differs.
import { readFile, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = (path) => fileURLToPath(new URL(path, import.meta.url));
const target = here("../static/live.js");
const license = await readFile(here("node_modules/uplot/LICENSE"), "utf8");

const { outputFiles } = await build({
  absWorkingDir: here("."),
  entryPoints: ["src/index.js"],
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2020",
  charset: "utf8",
  loader: { ".css": "text" },
  legalComments: "none",
  banner: { js: `/*! gpulab live view (Apache-2.0). Built file: see ../live. Contains uPlot:\n${license.trim()}\n*/` },
  write: false,
});
const built = outputFiles[0].contents;

if (process.argv.includes("--check")) {
  const committed = await readFile(target).catch(() => Buffer.alloc(0));
  if (!committed.equals(built)) {
    console.error("static/live.js is not what its source builds: run `npm ci && npm run build` in gpulab/views/live");
    process.exit(1);
  }
} else {
  await writeFile(target, built);
  console.log(`static/live.js: ${built.length} bytes`);
}
