// The map of ranks: a cell each, coloured and shaped by state, on a canvas that redraws only what changed.

const PITCHES = [48, 40, 32, 26, 22, 18, 15, 12, 10, 8, 7, 6];
const HEIGHT = 420; // as high as it may be before cells get smaller
const STATES = { r: "running", x: "exited", i: "starting", w: "waiting", l: "slow", m: "missing", o: "lost", f: "frozen", s: "stalled", d: "dead" };
const LABEL = 16;
const SLICE_MS = 4;
const LABELLED = 64; // more blocks than this have no labels of their own

const canvas = document.getElementById("map-canvas");
const readout = document.getElementById("map-readout");
const pen = canvas?.getContext("2d");
let ranks = [], letters = [], blocks = [], places = [], sprites = new Map();
let pitch = 0, queue = [], at = -1, known = "", width = 0;

export function update() {
  if (!canvas) return;
  const layout = document.querySelector(".map-layout");
  const told = document.querySelector(".map-cells");
  canvas.hidden = !layout || !told;
  if (canvas.hidden) return;
  const shape = layout.dataset.ranks + layout.dataset.blocks;
  const fresh = unrun(told.dataset.cells);
  if (shape !== known || canvas.parentElement.clientWidth !== width || fresh.length < ranks.length) {
    known = shape;
    ranks = unpack(layout.dataset.ranks);
    blocks = JSON.parse(layout.dataset.blocks).map(([label, packed]) => ({ label, ranks: unpack(packed) }));
    letters = fresh;
    arrange();
    redraw();
  } else {
    const before = letters;
    letters = fresh;
    const changed = ranks.map((_, i) => i).filter((i) => before[i] !== letters[i]);
    // A ring reaches over its neighbours: without it all are drawn again.
    if (changed.some((i) => isCulprit(before[i]) !== isCulprit(letters[i]))) redraw();
    else paint(changed);
  }
  tell();
}

function unpack(text) {
  const found = [];
  for (const part of text ? text.split(",") : []) {
    const [span, step] = part.split(":");
    const [first, last] = span.split("-").map(Number);
    for (let rank = first; rank <= (last ?? first); rank += Number(step ?? 1)) found.push(rank);
  }
  return found;
}

function unrun(text) {
  const found = [];
  for (const [, count, letter] of text.matchAll(/(\d+)([a-zA-Z])/g)) for (let n = Number(count); n > 0; n--) found.push(letter);
  return found;
}

function isCulprit(letter) {
  return letter < "a";
}

// Places every cell, as large as fits.
function arrange() {
  width = canvas.parentElement.clientWidth;
  const index = new Map(ranks.map((rank, i) => [rank, i]));
  for (const block of blocks) block.cells = block.ranks.map((rank) => index.get(rank)).filter((i) => i !== undefined);
  let height = 0;
  for (pitch of PITCHES) if ((height = flow()) <= HEIGHT) break;
  const dots = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * dots);
  canvas.height = Math.round(height * dots);
  canvas.style.height = `${height}px`;
  pen.setTransform(dots, 0, 0, dots, 0, 0);
  sprites = new Map();
}

// Blocks side by side, each at most as wide as the map; returns the height.
function flow() {
  const most = Math.max(1, Math.floor((width - 4) / pitch));
  const label = labelled() ? LABEL : 0;
  const gap = blocks.length > 1 ? Math.max(3, pitch / 3) : 0;
  let x = 2, y = 2, lowest = 0;
  places = new Array(ranks.length);
  for (const block of blocks) {
    const count = block.cells.length;
    const wide = Math.min(most, count <= 8 ? count : count <= 64 ? 8 : blocks.length > 1 ? Math.ceil(Math.sqrt(count * 2)) : most);
    const across = Math.max(wide * pitch, label ? Math.min(block.label.length * 7 + 8, 150) : 0);
    if (x > 2 && x + across > width) {
      x = 2;
      y = lowest + gap;
    }
    Object.assign(block, { x, y });
    block.cells.forEach((i, n) => {
      places[i] = { x: x + (n % wide) * pitch, y: y + label + Math.floor(n / wide) * pitch, block };
    });
    lowest = Math.max(lowest, y + label + Math.ceil(count / wide) * pitch);
    x += across + gap;
  }
  return Math.ceil(lowest) + 4;
}

function labelled() {
  return pitch >= 10 && blocks.length <= LABELLED;
}

function redraw() {
  pen.clearRect(0, 0, canvas.width, canvas.height);
  if (labelled()) {
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "top";
    pen.textAlign = "left";
    pen.fillStyle = getComputedStyle(canvas).color;
    for (const { label, x, y } of blocks) pen.fillText(label, x + 1, y, 150);
  }
  paint(ranks.map((_, i) => i));
}

// Draws cells, a few milliseconds of each frame: thousands at once would hold up the page.
function paint(cells) {
  const idle = !queue.length;
  queue = idle ? cells : [...new Set([...queue, ...cells])];
  if (idle && cells.length) step();
}

function step() {
  const end = performance.now() + SLICE_MS;
  let done = 0;
  while (done < queue.length && (done % 64 || performance.now() < end)) draw(queue[done++]);
  queue = queue.slice(done);
  if (queue.length) requestAnimationFrame(step);
  else rings();
}

// A cell of a few pixels is easily overlooked: a ring around it is not.
function rings() {
  const found = ranks.map((_, i) => i).filter((i) => isCulprit(letters[i] ?? "r") && places[i]);
  if (pitch >= 12 || found.length > 64) return;
  pen.strokeStyle = getComputedStyle(canvas).color;
  pen.lineWidth = 2;
  for (const i of found) {
    pen.beginPath();
    pen.arc(places[i].x + pitch / 2, places[i].y + pitch / 2, pitch + 5, 0, 2 * Math.PI);
    pen.stroke();
  }
}

function draw(i) {
  const place = places[i];
  if (!place) return;
  pen.clearRect(place.x, place.y, pitch, pitch);
  pen.drawImage(sprite(letters[i] ?? "r"), place.x, place.y, pitch, pitch);
  if (pitch >= 26) {
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    pen.fillStyle = isCulprit(letters[i] ?? "r") ? "#fff" : getComputedStyle(canvas).color;
    pen.fillText(ranks[i], place.x + pitch / 2 - 1, place.y + pitch - 7);
  }
  if (i === at) {
    pen.strokeStyle = getComputedStyle(document.querySelector("a")).color;
    pen.lineWidth = 2;
    pen.strokeRect(place.x + 1, place.y + 1, pitch - 3, pitch - 3);
  }
}

// The picture of a state, drawn once: its shape from the page's own symbols, its colours from the style sheet.
function sprite(letter) {
  const held = sprites.get(letter);
  if (held) return held;
  const name = STATES[letter.toLowerCase()], culprit = isCulprit(letter);
  const probe = document.createElement("span");
  probe.className = `cell ${name}${culprit ? " culprit" : ""}`;
  canvas.after(probe);
  const { color, backgroundColor } = getComputedStyle(probe);
  const dots = window.devicePixelRatio || 1, gap = pitch >= 12 ? 3 : 1, size = pitch - gap;
  const made = document.createElement("canvas");
  made.width = made.height = Math.round(pitch * dots);
  const ink = made.getContext("2d");
  ink.scale(dots, dots);
  if (pitch >= 12 || culprit) {
    ink.fillStyle = backgroundColor;
    ink.fillRect(0, 0, size, size);
  }
  if (culprit && pitch >= 12) {
    ink.strokeStyle = getComputedStyle(canvas).color;
    ink.lineWidth = 2;
    ink.strokeRect(1, 1, size - 2, size - 2);
  }
  const number = pitch >= 26 ? 12 : 0, glyph = Math.max(4, (size - number) * (pitch >= 12 ? 0.6 : 1));
  ink.translate((size - glyph) / 2, (size - number - glyph) / 2);
  ink.scale(glyph / 16, glyph / 16);
  ink.fillStyle = color;
  ink.fill(new Path2D(document.querySelector(`#shape-${name} path`).getAttribute("d")), "evenodd");
  probe.remove();
  sprites.set(letter, made);
  return made;
}

function tell() {
  const letter = letters[at];
  const text = at < 0 || !places[at] ? "" : `rank ${ranks[at]} · ${places[at].block.label} · ${STATES[letter.toLowerCase()]}${isCulprit(letter) ? " · culprit" : ""}`;
  if (readout.textContent !== text) readout.textContent = text;
}

function select(i) {
  const before = at;
  at = i;
  for (const one of [before, at]) if (one >= 0) draw(one);
  tell();
}

function under(event) {
  const box = canvas.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  return places.findIndex((p) => p && x >= p.x && x < p.x + pitch && y >= p.y && y < p.y + pitch);
}

// The next cell in a direction, by where cells are on the screen.
function next(dx, dy) {
  if (at < 0) return 0;
  const here = places[at];
  let best = at, shortest = Infinity;
  places.forEach((p, i) => {
    const along = (p.x - here.x) * dx + (p.y - here.y) * dy;
    const aside = Math.abs((p.x - here.x) * dy) + Math.abs((p.y - here.y) * dx);
    if (along > 1 && along + 4 * aside < shortest) {
      shortest = along + 4 * aside;
      best = i;
    }
  });
  return best;
}

export function listen(open) {
  if (!canvas) return;
  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  canvas.addEventListener("pointermove", (event) => select(under(event)));
  canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && select(-1));
  canvas.addEventListener("click", (event) => under(event) >= 0 && open(ranks[under(event)]));
  canvas.addEventListener("keydown", (event) => {
    if (arrows[event.key]) select(next(...arrows[event.key]));
    else if (event.key === "Enter" && at >= 0) open(ranks[at]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  new ResizeObserver(() => canvas.parentElement.clientWidth !== width && update()).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
}

export function recolour() {
  sprites = new Map();
  if (canvas && !canvas.hidden) redraw();
}
