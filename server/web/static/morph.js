// Updates elements in place with idiomorph, so that focus, selection and scroll position stay as they are.

import { Idiomorph } from "./vendor/idiomorph/idiomorph.esm.js";

const callbacks = {
  // Most of a page is unchanged, and the browser compares faster than idiomorph.
  beforeNodeMorphed: (current, wanted) => {
    if (areOtherDetails(current, wanted)) current.open = wanted.open;
    return !current.isEqualNode(wanted);
  },
  beforeAttributeUpdated: (name, element) => !isSetByReader(name, element),
};

export function morphElement(current, wanted) {
  Idiomorph.morph(current, wanted, { ignoreActiveValue: true, callbacks });
}

// Which details are open, and the fields of the form for new stacks, are the reader's choice.
function isSetByReader(name, element) {
  if (name === "open") return element.nodeName === "DETAILS";
  return ["value", "checked"].includes(name) && Boolean(element.closest("#dump-form"));
}

// Whether an element is reused for other details than the reader has opened or closed.
function areOtherDetails(current, wanted) {
  if (current.nodeName !== "DETAILS" || wanted.nodeName !== "DETAILS") return false;
  const [before, after] = [current, wanted].map((details) => details.querySelector("summary"));
  return before?.textContent !== after?.textContent;
}
