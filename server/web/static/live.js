// Updates the page's parts by server-sent events from the page's own address, and shows a notice while it cannot.

import { morphElement } from "./morph.js";

const SILENCE_LIMIT_MS = 5000; // the server sends an event at least every two seconds
const RETRY_MS = 1000;
const CHECK_INTERVAL_MS = 500;
const notice = document.getElementById("connection");
let source = null;
let lastEventAt = Date.now();
let isLost = false;
let onPartChange = () => {};

export function startUpdates(onChange) {
  onPartChange = onChange;
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
  setInterval(checkConnection, CHECK_INTERVAL_MS);
  connect();
}

export function restartUpdates() {
  disconnect();
  connect();
}

function connect() {
  if (source || document.hidden || !document.querySelector("main[data-live]")) return;
  lastEventAt = isLost ? lastEventAt : Date.now();
  const current = (source = new EventSource(location.href));
  source.addEventListener("part", (event) => {
    recordEvent();
    setTimeout(() => current === source && showPart(JSON.parse(event.data))); // one task for each part, so that the page stays responsive
  });
  source.addEventListener("alive", recordEvent);
  source.addEventListener("gone", (event) => {
    disconnect();
    showNotice(`This page is no longer updated: ${JSON.parse(event.data).detail}.`);
  });
  source.onerror = () => {
    isLost = true;
    disconnect();
    checkConnection();
    reloadIfSignedOut();
    setTimeout(connect, RETRY_MS);
  };
}

function disconnect() {
  source?.close();
  source = null;
}

function recordEvent() {
  lastEventAt = Date.now();
  if (isLost || !notice.hidden) showNotice("");
  isLost = false;
}

function showPart({ id, html }) {
  const part = document.getElementById(id);
  if (!part) return;
  const startedAt = performance.now();
  const markup = `<${part.localName}>${html}</${part.localName}>`;
  const updated = new DOMParser().parseFromString(markup, "text/html").body.firstChild;
  for (const { name, value } of part.attributes) updated.setAttribute(name, value);
  morphElement(part, updated);
  document.title = document.querySelector("[data-title]")?.dataset.title ?? document.title;
  onPartChange(id);
  performance.measure(`part ${id}`, { start: startedAt, end: performance.now() });
}

function checkConnection() {
  if (document.hidden || !document.querySelector("main[data-live]")) return;
  const silenceMs = Date.now() - lastEventAt;
  if (source && silenceMs > SILENCE_LIMIT_MS) {
    isLost = true;
    restartUpdates();
  }
  if (isLost) {
    const ageS = Math.round(silenceMs / 1000);
    showNotice(`No connection to the server. This page is ${ageS} s old (${new Date(lastEventAt).toLocaleTimeString()}). Reconnecting…`);
  }
}

// The server sends the login page instead of events once the session has expired.
async function reloadIfSignedOut() {
  try {
    const response = await fetch(location.href, { headers: { Accept: "text/html" }, redirect: "manual" });
    if (response.type === "opaqueredirect") location.reload();
  } catch {
    // The connection is lost, since there is no response.
  }
}

function showNotice(text) {
  if (notice.textContent !== text) notice.textContent = text;
  notice.hidden = !text;
}
