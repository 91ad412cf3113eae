// Fetches the page again every two seconds and swaps its <main>, so that scroll position, open details and the
// text that is being selected stay as they are.
"use strict";

const PERIOD_MS = 2000;
const connection = document.getElementById("connection");
let since = null;

function busy() {
  const selection = window.getSelection();
  const main = document.querySelector("main");
  return document.hidden || (selection && !selection.isCollapsed && main.contains(selection.anchorNode));
}

function keepDetails(from, to) {
  for (const old of from.querySelectorAll("details[id]")) {
    const fresh = to.querySelector("#" + CSS.escape(old.id));
    if (fresh) fresh.open = old.open;
  }
}

async function refresh() {
  const main = document.querySelector("main[data-live]");
  if (!main || busy()) return;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, signal: AbortSignal.timeout(5000) });
    if (answer.redirected && new URL(answer.url).pathname.endsWith("/login")) return location.reload();
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const next = fresh.querySelector("main");
    if (!next) throw new Error("no page");
    keepDetails(main, next);
    if (next.innerHTML !== main.innerHTML) {
      const focused = main.contains(document.activeElement) && document.activeElement.getAttribute("href");
      main.replaceWith(next);
      document.title = fresh.title;
      if (focused) next.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    }
    since = null;
    connection.hidden = true;
  } catch {
    since ??= new Date();
    connection.textContent = `The server does not answer: this is as of ${since.toLocaleTimeString()}`;
    connection.hidden = false;
  }
}

async function loop() {
  await refresh();
  setTimeout(loop, PERIOD_MS);
}

setTimeout(loop, PERIOD_MS);
