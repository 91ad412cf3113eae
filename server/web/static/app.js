// Links and filters that change the view without reloading the page, the keyboard, the theme, and the buttons.

import { restartUpdates, startUpdates } from "./live.js";
import { listenForSelection, redrawColours, updateMap } from "./map.js";
import { morphElement } from "./morph.js";

const TYPING_DELAY_MS = 250;
const root = document.documentElement.dataset.root;
const main = document.querySelector("main");
let latestNavigation = 0;

// Shows another view of this page: its address, its content, then its updates.
async function showView(url, { push = true } = {}) {
  const number = ++latestNavigation;
  let loaded;
  try {
    const response = await fetch(url, { headers: { Accept: "text/html" } });
    loaded = new DOMParser().parseFromString(await response.text(), "text/html");
  } catch {
    return; // live.js shows a notice that the connection is lost
  }
  const next = loaded.querySelector("main[data-live]");
  if (!next) return location.assign(url);
  if (number !== latestNavigation) return;
  if (push) history.pushState(null, "", url);
  // The canvas and its text are not in the server's page: they stay.
  for (const part of next.querySelectorAll("#map-canvas, #map-readout")) part.replaceWith(document.getElementById(part.id).cloneNode(true));
  morphElement(main, next);
  document.title = loaded.title;
  updateMap();
  restartUpdates();
}

function isThisPage(url) {
  return url.origin === location.origin && url.pathname === location.pathname;
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("main a[href]");
  if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || !main.hasAttribute("data-live")) return;
  if (!isThisPage(new URL(link.href)) || link.hash) return;
  event.preventDefault();
  showView(link.href);
});

function buildFilterUrl(form) {
  const url = new URL(form.action);
  url.search = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
  return url.href;
}

function showFilteredView(form) {
  const url = buildFilterUrl(form);
  if (url !== location.href) showView(url);
}

let filterTimer = 0;
for (const kind of ["submit", "input", "change"]) {
  document.addEventListener(kind, (event) => {
    const form = event.target.closest("form[data-filter]");
    if (!form) return;
    if (kind === "submit") event.preventDefault();
    clearTimeout(filterTimer);
    filterTimer = setTimeout(() => showFilteredView(form), kind === "input" ? TYPING_DELAY_MS : 0);
  });
}

addEventListener("popstate", () => showView(location.href, { push: false }));

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/" && !isTyping) {
    document.getElementById("q")?.focus();
    document.getElementById("q")?.select();
  } else if (event.key === "Escape") {
    if (document.activeElement !== document.body && document.activeElement !== main) document.activeElement.blur();
    else document.querySelector("[data-up]")?.click();
    return;
  } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && !event.target.matches("select, textarea")) {
    const rows = [...document.querySelectorAll("[data-row], a.card")];
    const current = rows.indexOf(document.activeElement);
    if (!rows.length || (current < 0 && !isTyping && document.activeElement !== document.body)) return;
    rows[Math.min(rows.length - 1, Math.max(0, current + (event.key === "ArrowDown" ? 1 : -1)))].focus();
  } else return;
  event.preventDefault();
});

const theme = document.getElementById("theme");
if (theme) {
  theme.parentElement.hidden = false;
  theme.value = document.documentElement.dataset.theme ?? "";
  theme.addEventListener("change", () => {
    if (theme.value) document.documentElement.dataset.theme = theme.value;
    else delete document.documentElement.dataset.theme;
    try {
      localStorage.setItem("theme", theme.value);
    } catch {
      // The choice applies to this page only, since there is no storage.
    }
    redrawColours();
  });
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const label = (button.dataset.label ??= button.textContent);
  try {
    copyText(await (await fetch(button.dataset.copy)).text());
    button.textContent = "Copied";
  } catch {
    button.textContent = "Copy failed: the server does not respond";
  }
  setTimeout(() => (button.textContent = label), 3000);
});

// navigator.clipboard is not used: browsers offer it over TLS only, which many servers do not use.
function copyText(text) {
  const field = Object.assign(document.createElement("textarea"), { value: text, className: "offscreen" });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

// "0, 4-7" as a list of numbers; anything else as null.
function parseRanks(text) {
  const ranks = [];
  for (const part of text.split(",").map((one) => one.trim()).filter(Boolean)) {
    const [, first, last] = /^(\d{1,6})(?:\s*-\s*(\d{1,6}))?$/.exec(part) ?? [];
    if (first === undefined) return null;
    for (let rank = Number(first); rank <= Number(last ?? first); rank++) ranks.push(rank);
  }
  return ranks.length ? ranks : null;
}

document.getElementById("dump-form")?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const error = document.getElementById("dump-error");
  const showError = (text) => Object.assign(error, { textContent: text, hidden: !text });
  const ranks = parseRanks(document.getElementById("dump-ranks").value);
  if (!ranks) return showError("Not a list of ranks. Write them as 0, 4-7.");
  showError("");
  const body = JSON.stringify({ job: event.target.dataset.job, ranks, native: document.getElementById("dump-native").checked });
  try {
    const response = await fetch(`${root}/api/v1/dumps`, { method: "POST", headers: { "Content-Type": "application/json" }, body });
    const dump = await response.json();
    if (!response.ok) return showError(`${dump.detail}.`);
    const url = new URL(location.href);
    url.searchParams.set("dump", dump.id);
    showView(url.href);
  } catch {
    showError("The server does not respond. No stacks were requested.");
  }
});

listenForSelection((rank) => {
  const url = new URL(location.href);
  url.searchParams.delete("view");
  url.searchParams.set("q", rank);
  showView(url.href);
});
updateMap();
if (main.hasAttribute("data-live")) startUpdates((id) => id.startsWith("map_") && updateMap());
performance.mark("usable");
