// Keeps the page's parts up to date by server-sent events from the page's own address, and says so when it cannot.

import { morph } from "./morph.js";

const SILENT_MS = 5000; // the server says something every two seconds
const RETRY_MS = 1000;
const notice = document.getElementById("connection");
let source = null;
let heard = Date.now();
let lost = false;
let changed = () => {};

export function follow(onChange) {
  changed = onChange;
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  setInterval(check, 500);
  start();
}

export function restart() {
  stop();
  start();
}

function start() {
  if (source || document.hidden || !document.querySelector("main[data-live]")) return;
  heard = lost ? heard : Date.now();
  const mine = (source = new EventSource(location.href));
  source.addEventListener("part", (event) => {
    alive();
    setTimeout(() => mine === source && show(JSON.parse(event.data))); // a task each, so that together they do not hold up the page
  });
  source.addEventListener("alive", alive);
  source.addEventListener("gone", (event) => {
    stop();
    say(`This page is no longer kept up to date: ${JSON.parse(event.data).detail}.`);
  });
  source.onerror = () => {
    lost = true;
    stop();
    check();
    signedOut();
    setTimeout(start, RETRY_MS);
  };
}

function stop() {
  source?.close();
  source = null;
}

function alive() {
  heard = Date.now();
  if (lost || !notice.hidden) say("");
  lost = false;
}

function show({ id, html }) {
  const part = document.getElementById(id);
  if (!part) return;
  const began = performance.now();
  const fresh = new DOMParser().parseFromString(`<div>${html}</div>`, "text/html").body.firstChild;
  for (const { name, value } of part.attributes) fresh.setAttribute(name, value);
  morph(part, fresh);
  document.title = document.querySelector("[data-title]")?.dataset.title ?? document.title;
  changed(id);
  performance.measure(`part ${id}`, { start: began, end: performance.now() });
}

function check() {
  if (document.hidden || !document.querySelector("main[data-live]")) return;
  const silent = Date.now() - heard;
  if (source && silent > SILENT_MS) {
    lost = true;
    restart();
  }
  if (lost) {
    const age = Math.round(silent / 1000);
    say(`No connection to the server: what you see is ${age} s old, as of ${new Date(heard).toLocaleTimeString()}. Trying again…`);
  }
}

// An expired session answers with the login page instead of events.
async function signedOut() {
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, redirect: "manual" });
    if (answer.type === "opaqueredirect") location.reload();
  } catch {
    // No answer at all: the connection is what is lost.
  }
}

function say(text) {
  if (notice.textContent !== text) notice.textContent = text;
  notice.hidden = !text;
}
