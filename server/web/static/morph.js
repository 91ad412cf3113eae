// Makes one element's content like another's by changing only what differs, so that focus, selection, scroll position and
// open details stay as they are.

export function morph(from, to) {
  attributes(from, to);
  const keyed = new Map();
  for (const child of from.children) if (child.id) keyed.set(child.id, child);
  let at = from.firstChild;
  for (const next of [...to.childNodes]) {
    if (at?.isEqualNode(next)) { // most of a page: the browser compares far quicker than what follows would
      at = at.nextSibling;
      continue;
    }
    const known = next.id && keyed.get(next.id);
    if (known && known !== at && !fits(at, next)) {
      from.insertBefore(known, at);
      at = known;
    }
    if (at && fits(at, next)) {
      const rest = at.nextSibling;
      if (at.nodeType === Node.ELEMENT_NODE) morph(at, next);
      else if (at.data !== next.data) at.data = next.data;
      at = rest;
    } else {
      from.insertBefore(document.importNode(next, true), at);
    }
  }
  while (at) {
    const rest = at.nextSibling;
    at.remove();
    at = rest;
  }
}

function fits(node, next) {
  return Boolean(node) && node.nodeName === next.nodeName && (node.id ?? "") === (next.id ?? "");
}

function attributes(from, to) {
  for (const { name, value } of to.attributes) {
    if (name === "open" && from.nodeName === "DETAILS") continue; // the reader's own choice
    if (from.getAttribute(name) !== value) from.setAttribute(name, value);
  }
  for (const { name } of [...from.attributes]) {
    if (!to.hasAttribute(name) && !(name === "open" && from.nodeName === "DETAILS")) from.removeAttribute(name);
  }
}
