// Links and filters that change the view without loading the page anew, the keyboard, the theme, and the buttons.

import { follow, restart } from "./live.js";
import { listen, recolour, update } from "./map.js";
import { morph } from "./morph.js";

const TYPED_MS = 250;
const root = document.documentElement.dataset.root;
const main = document.querySelector("main");
let latest = 0;

// Shows another view of this page: its address, its content, then its events.
async function go(url, { push = true } = {}) {
  const number = ++latest;
  let fresh;
  try {
    const answer = await fetch(url, { headers: { Accept: "text/html" } });
    fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  } catch {
    return; // the notice of a lost connection says what is wrong
  }
  const next = fresh.querySelector("main[data-live]");
  if (!next) return location.assign(url);
  if (number !== latest) return;
  if (push) history.pushState(null, "", url);
  keepTyped(next);
  for (const part of next.querySelectorAll("#map-canvas, #map-readout")) part.replaceWith(document.getElementById(part.id).cloneNode(true));
  morph(main, next);
  document.title = fresh.title;
  update();
  restart();
}

// What is being typed is newer than what the server has seen of it.
function keepTyped(next) {
  for (const field of main.querySelectorAll("form[data-filter] [name]")) {
    const its = next.querySelector(`form[data-filter] [name="${field.name}"]`);
    if (its && field !== document.activeElement) field.value = its.value;
  }
}

function samePage(url) {
  return url.origin === location.origin && url.pathname === location.pathname;
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("main a[href]");
  if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || !main.hasAttribute("data-live")) return;
  if (!samePage(new URL(link.href)) || link.hash) return;
  event.preventDefault();
  go(link.href);
});

function query(form) {
  const url = new URL(form.action);
  url.search = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
  return url.href;
}

let typed = 0;
for (const kind of ["submit", "input", "change"]) {
  document.addEventListener(kind, (event) => {
    const form = event.target.closest("form[data-filter]");
    if (!form) return;
    if (kind === "submit") event.preventDefault();
    clearTimeout(typed);
    typed = setTimeout(() => query(form) !== location.href && go(query(form)), kind === "input" ? TYPED_MS : 0);
  });
}

addEventListener("popstate", () => go(location.href, { push: false }));

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/" && !typing) {
    document.getElementById("q")?.focus();
    document.getElementById("q")?.select();
  } else if (event.key === "Escape") {
    if (document.activeElement !== document.body && document.activeElement !== main) document.activeElement.blur();
    else document.querySelector("[data-up]")?.click();
    return;
  } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && !event.target.matches("select, textarea")) {
    const rows = [...document.querySelectorAll("[data-row], a.card")];
    const here = rows.indexOf(document.activeElement);
    if (!rows.length || (here < 0 && !typing && document.activeElement !== document.body)) return;
    rows[Math.min(rows.length - 1, Math.max(0, here + (event.key === "ArrowDown" ? 1 : -1)))].focus();
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
      // It holds for this page then.
    }
    recolour();
  });
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const label = (button.dataset.label ??= button.textContent);
  try {
    copy(await (await fetch(button.dataset.copy)).text());
    button.textContent = "Copied";
  } catch {
    button.textContent = "Could not be copied: the server does not answer";
  }
  setTimeout(() => (button.textContent = label), 3000);
});

// Not navigator.clipboard: browsers offer it over TLS only, and many a server has none.
function copy(text) {
  const field = Object.assign(document.createElement("textarea"), { value: text, className: "offscreen" });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

// "0, 4-7" as a list of numbers; anything else as null.
function rankList(text) {
  const found = [];
  for (const part of text.split(",").map((one) => one.trim()).filter(Boolean)) {
    const [, first, last] = /^(\d{1,6})(?:\s*-\s*(\d{1,6}))?$/.exec(part) ?? [];
    if (first === undefined) return null;
    for (let rank = Number(first); rank <= Number(last ?? first); rank++) found.push(rank);
  }
  return found.length ? found : null;
}

document.getElementById("dump-form")?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const error = document.getElementById("dump-error");
  const fail = (text) => Object.assign(error, { textContent: text, hidden: !text });
  const ranks = rankList(document.getElementById("dump-ranks").value);
  if (!ranks) return fail("Which ranks? Write them as 0, 4-7.");
  fail("");
  const body = JSON.stringify({ job: event.target.dataset.job, ranks, native: document.getElementById("dump-native").checked });
  try {
    const answer = await fetch(`${root}/api/v1/dumps`, { method: "POST", headers: { "Content-Type": "application/json" }, body });
    const told = await answer.json();
    if (!answer.ok) return fail(`${told.detail}.`);
    const url = new URL(location.href);
    url.searchParams.set("dump", told.id);
    go(url.href);
  } catch {
    fail("The server does not answer: nothing was asked for.");
  }
});

listen((rank) => {
  const url = new URL(location.href);
  url.searchParams.delete("view");
  url.searchParams.set("q", rank);
  go(url.href);
});
update();
if (main.hasAttribute("data-live")) follow((id) => id.startsWith("map_") && update());
performance.mark("usable");
