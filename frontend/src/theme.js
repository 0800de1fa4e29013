// Light or dark, as the page around us is; tells when that changes.

const PALETTES = {
  light: {
    text: "#3b4252",
    faint: "#6b7280",
    grid: "rgba(100,116,139,0.16)",
    band: "rgba(100,116,139,0.09)",
    series: ["#1d63c4", "#0b8a74", "#a3540b", "#7b46b8", "#b3305f", "#4d6a00"],
    step: "#1d63c4",
    wait: "#c2660c",
    waitFill: "rgba(217,119,6,0.26)",
    slowest: "rgba(29,99,196,0.35)",
  },
  dark: {
    text: "#d5dae3",
    faint: "#9aa4b4",
    grid: "rgba(148,163,184,0.17)",
    band: "rgba(148,163,184,0.10)",
    series: ["#79b0ff", "#4fd1b5", "#f2ad62", "#c4a1f5", "#f58fb1", "#b6d35c"],
    step: "#79b0ff",
    wait: "#f2ad62",
    waitFill: "rgba(242,173,98,0.26)",
    slowest: "rgba(121,176,255,0.40)",
  },
};

/** JupyterLab and Notebook 7, VS Code and Colab each say it in their own attribute; elsewhere the system does. */
export function isDark() {
  const { body, documentElement: html } = document;
  if (body.dataset.jpThemeLight !== undefined) return body.dataset.jpThemeLight === "false";
  const vscode = body.dataset.vscodeThemeKind;
  if (vscode !== undefined) return vscode.includes("dark") || vscode === "vscode-high-contrast";
  const colab = html.getAttribute("theme");
  if (colab) return colab === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

export function palette() {
  return isDark() ? PALETTES.dark : PALETTES.light;
}

/** Calls `changed` after each change of theme; returns the function that ends it. */
export function watchTheme(changed) {
  const media = matchMedia("(prefers-color-scheme: dark)");
  const observer = new MutationObserver(() => changed());
  const attributes = ["data-jp-theme-light", "data-jp-theme-name", "data-vscode-theme-kind", "theme", "class"];
  observer.observe(document.body, { attributes: true, attributeFilter: attributes });
  observer.observe(document.documentElement, { attributes: true, attributeFilter: attributes });
  media.addEventListener("change", changed);
  return () => {
    observer.disconnect();
    media.removeEventListener("change", changed);
  };
}
