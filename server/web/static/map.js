// The map of ranks: one cell per rank, coloured and shaped by state, on a canvas that redraws only what changed.

const PITCHES_PX = [48, 40, 32, 26, 22, 18, 15, 12, 10, 8, 7, 6];
const MAX_HEIGHT_PX = 420; // cells get smaller before the map gets higher
const STATES = { r: "running", x: "exited", i: "starting", w: "waiting", l: "slow", m: "missing", o: "lost", f: "frozen", s: "stalled", d: "dead" };
const LABEL_HEIGHT_PX = 16;
const SLICE_MS = 4;
const MAX_LABELLED_BLOCKS = 64;

const canvas = document.getElementById("map-canvas");
const readout = document.getElementById("map-readout");
const context = canvas?.getContext("2d");
let ranks = [], letters = [], blocks = [], places = [], sprites = new Map();
let pitch = 0, drawQueue = [], selected = -1, drawnLayout = "", width = 0;

export function updateMap() {
  if (!canvas) return;
  const layout = document.querySelector(".map-layout");
  const cells = document.querySelector(".map-cells");
  canvas.hidden = !layout || !cells;
  if (canvas.hidden) return;
  const shape = layout.dataset.ranks + layout.dataset.blocks;
  const updated = decodeRuns(cells.dataset.cells);
  if (shape !== drawnLayout || canvas.parentElement.clientWidth !== width || updated.length < ranks.length) {
    drawnLayout = shape;
    ranks = unpackRanks(layout.dataset.ranks);
    blocks = JSON.parse(layout.dataset.blocks).map(([label, packed]) => ({ label, ranks: unpackRanks(packed) }));
    letters = updated;
    layOutCells();
    redrawAll();
  } else {
    const before = letters;
    letters = updated;
    const changed = ranks.map((_, i) => i).filter((i) => before[i] !== letters[i]);
    // A ring overlaps its neighbours: to remove one, everything is drawn again.
    if (changed.some((i) => isCulprit(before[i]) !== isCulprit(letters[i]))) redrawAll();
    else queueCells(changed);
  }
  updateReadout();
}

function unpackRanks(text) {
  const found = [];
  for (const part of text ? text.split(",") : []) {
    const [span, step] = part.split(":");
    const [first, last] = span.split("-").map(Number);
    for (let rank = first; rank <= (last ?? first); rank += Number(step ?? 1)) found.push(rank);
  }
  return found;
}

function decodeRuns(text) {
  const found = [];
  for (const [, count, letter] of text.matchAll(/(\d+)([a-zA-Z])/g)) for (let n = Number(count); n > 0; n--) found.push(letter);
  return found;
}

function isCulprit(letter) {
  return letter < "a";
}

// Places all cells, as large as fits.
function layOutCells() {
  width = canvas.parentElement.clientWidth;
  const index = new Map(ranks.map((rank, i) => [rank, i]));
  for (const block of blocks) block.cells = block.ranks.map((rank) => index.get(rank)).filter((i) => i !== undefined);
  let height = 0;
  for (pitch of PITCHES_PX) if ((height = placeBlocks()) <= MAX_HEIGHT_PX) break;
  const pixelRatio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * pixelRatio);
  canvas.height = Math.round(height * pixelRatio);
  canvas.style.height = `${height}px`;
  context.setTransform(pixelRatio, 0, 0, pixelRatio, 0, 0);
  sprites = new Map();
}

// Places blocks side by side, each at most as wide as the map. Returns the height in pixels.
function placeBlocks() {
  const maxColumns = Math.max(1, Math.floor((width - 4) / pitch));
  const label = showsLabels() ? LABEL_HEIGHT_PX : 0;
  const gap = blocks.length > 1 ? Math.max(3, pitch / 3) : 0;
  let x = 2, y = 2, bottom = 0;
  places = new Array(ranks.length);
  for (const block of blocks) {
    const count = block.cells.length;
    const columns = Math.min(maxColumns, count <= 8 ? count : count <= 64 ? 8 : blocks.length > 1 ? Math.ceil(Math.sqrt(count * 2)) : maxColumns);
    const blockWidth = Math.max(columns * pitch, label ? Math.min(block.label.length * 7 + 8, 150) : 0);
    if (x > 2 && x + blockWidth > width) {
      x = 2;
      y = bottom + gap;
    }
    Object.assign(block, { x, y });
    block.cells.forEach((i, n) => {
      places[i] = { x: x + (n % columns) * pitch, y: y + label + Math.floor(n / columns) * pitch, block };
    });
    bottom = Math.max(bottom, y + label + Math.ceil(count / columns) * pitch);
    x += blockWidth + gap;
  }
  return Math.ceil(bottom) + 4;
}

function showsLabels() {
  return pitch >= 10 && blocks.length <= MAX_LABELLED_BLOCKS;
}

function redrawAll() {
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (showsLabels()) {
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "top";
    context.textAlign = "left";
    context.fillStyle = getComputedStyle(canvas).color;
    for (const { label, x, y } of blocks) context.fillText(label, x + 1, y, 150);
  }
  queueCells(ranks.map((_, i) => i));
}

// Draws cells for a few milliseconds in each frame: thousands in one frame would block the page.
function queueCells(cells) {
  const isIdle = !drawQueue.length;
  drawQueue = isIdle ? cells : [...new Set([...drawQueue, ...cells])];
  if (isIdle && cells.length) drawQueued();
}

function drawQueued() {
  const end = performance.now() + SLICE_MS;
  let done = 0;
  while (done < drawQueue.length && (done % 64 || performance.now() < end)) drawCell(drawQueue[done++]);
  drawQueue = drawQueue.slice(done);
  if (drawQueue.length) requestAnimationFrame(drawQueued);
  else drawRings();
}

// A culprit's cell of a few pixels is easy to miss, so it gets a ring.
function drawRings() {
  const found = ranks.map((_, i) => i).filter((i) => isCulprit(letters[i] ?? "r") && places[i]);
  if (pitch >= 12 || found.length > 64) return;
  context.strokeStyle = getComputedStyle(canvas).color;
  context.lineWidth = 2;
  for (const i of found) {
    context.beginPath();
    context.arc(places[i].x + pitch / 2, places[i].y + pitch / 2, pitch + 5, 0, 2 * Math.PI);
    context.stroke();
  }
}

function drawCell(i) {
  const place = places[i];
  if (!place) return;
  context.clearRect(place.x, place.y, pitch, pitch);
  context.drawImage(getSprite(letters[i] ?? "r"), place.x, place.y, pitch, pitch);
  if (pitch >= 26) {
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "alphabetic";
    context.fillStyle = isCulprit(letters[i] ?? "r") ? "#fff" : getComputedStyle(canvas).color;
    context.fillText(ranks[i], place.x + pitch / 2 - 1, place.y + pitch - 7);
  }
  if (i === selected) {
    context.strokeStyle = getComputedStyle(document.querySelector("a")).color;
    context.lineWidth = 2;
    context.strokeRect(place.x + 1, place.y + 1, pitch - 3, pitch - 3);
  }
}

// The image of a state, drawn once: the shape comes from the page's symbols, the colours from the style sheet.
function getSprite(letter) {
  const cached = sprites.get(letter);
  if (cached) return cached;
  const name = STATES[letter.toLowerCase()], culprit = isCulprit(letter);
  const probe = document.createElement("span");
  probe.className = `cell ${name}${culprit ? " culprit" : ""}`;
  canvas.after(probe);
  const { color, backgroundColor } = getComputedStyle(probe);
  const pixelRatio = window.devicePixelRatio || 1, gap = pitch >= 12 ? 3 : 1, size = pitch - gap;
  const image = document.createElement("canvas");
  image.width = image.height = Math.round(pitch * pixelRatio);
  const brush = image.getContext("2d");
  brush.scale(pixelRatio, pixelRatio);
  if (pitch >= 12 || culprit) {
    brush.fillStyle = backgroundColor;
    brush.fillRect(0, 0, size, size);
  }
  if (culprit && pitch >= 12) {
    brush.strokeStyle = getComputedStyle(canvas).color;
    brush.lineWidth = 2;
    brush.strokeRect(1, 1, size - 2, size - 2);
  }
  const number = pitch >= 26 ? 12 : 0, glyph = Math.max(4, (size - number) * (pitch >= 12 ? 0.6 : 1));
  brush.translate((size - glyph) / 2, (size - number - glyph) / 2);
  brush.scale(glyph / 16, glyph / 16);
  brush.fillStyle = color;
  brush.fill(new Path2D(document.querySelector(`#shape-${name} path`).getAttribute("d")), "evenodd");
  probe.remove();
  sprites.set(letter, image);
  return image;
}

function updateReadout() {
  const letter = letters[selected];
  const text = selected < 0 || !places[selected] ? "" : `rank ${ranks[selected]} · ${places[selected].block.label} · ${STATES[letter.toLowerCase()]}${isCulprit(letter) ? " · culprit" : ""}`;
  if (readout.textContent !== text) readout.textContent = text;
}

function selectCell(i) {
  const before = selected;
  selected = i;
  for (const one of [before, selected]) if (one >= 0) drawCell(one);
  updateReadout();
}

function findCell(event) {
  const box = canvas.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  return places.findIndex((p) => p && x >= p.x && x < p.x + pitch && y >= p.y && y < p.y + pitch);
}

// The nearest cell in a direction on the screen.
function findNeighbour(dx, dy) {
  if (selected < 0) return 0;
  const current = places[selected];
  let best = selected, shortest = Infinity;
  places.forEach((p, i) => {
    const along = (p.x - current.x) * dx + (p.y - current.y) * dy;
    const aside = Math.abs((p.x - current.x) * dy) + Math.abs((p.y - current.y) * dx);
    if (along > 1 && along + 4 * aside < shortest) {
      shortest = along + 4 * aside;
      best = i;
    }
  });
  return best;
}

export function listenForSelection(openRank) {
  if (!canvas) return;
  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  canvas.addEventListener("pointermove", (event) => selectCell(findCell(event)));
  canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && selectCell(-1));
  canvas.addEventListener("click", (event) => findCell(event) >= 0 && openRank(ranks[findCell(event)]));
  canvas.addEventListener("keydown", (event) => {
    if (arrows[event.key]) selectCell(findNeighbour(...arrows[event.key]));
    else if (event.key === "Enter" && selected >= 0) openRank(ranks[selected]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  new ResizeObserver(() => canvas.parentElement.clientWidth !== width && updateMap()).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawColours);
}

export function redrawColours() {
  sprites = new Map();
  if (canvas && !canvas.hidden) redrawAll();
}
