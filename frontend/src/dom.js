// Elements in one call.

export function element(tag, className, parent, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text; // never innerHTML: names come from the user's machine
  parent?.append(node);
  return node;
}
