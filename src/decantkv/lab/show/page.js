"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const N = data.pieces.length, H = data.heads, L = data.layers.length;
const REGION = N > 20000 ? 512 : 256;
const state = { method: 0, other: -1, layer: -1, head: -1, ink: "kept", token: -1 };
const byId = (id) => document.getElementById(id);
const percent = (x) => (100 * x).toFixed(x < 0.0995 ? 1 : 0) + " %";
const number = (x) => (x === null ? "–" : x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e5) ? x.toExponential(2) : String(Number(x.toPrecision(3))));

// ---- unpacking -------------------------------------------------------------------------------------------------

async function inflate(text) {
  const raw = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

function read(quantised, scale) { // Uint16Array to numbers, as page.py's quantised() wrote them
  const { log, lo, step } = scale;
  return (i) => (log ? (quantised[i] === 0 ? 0 : Math.exp(lo + (quantised[i] - 1) * step)) : lo + quantised[i] * step);
}

const bits = [], missed = [], details = new Map();
const rowBytes = Math.ceil(N / 8);
const keeps = (m, l, h, i) => (bits[m][(l * H + h) * rowBytes + (i >> 3)] >> (i & 7)) & 1;

async function detail(place) { // {weight, distance, score[m], rank[m]} of each head, or null where not carried
  const packed = data.details[place];
  if (!packed) return null;
  if (!details.has(place)) {
    const buffer = await inflate(packed.bytes);
    let at = 0, scale = 0;
    const floats = () => { const a = new Uint16Array(buffer.slice(at, at + 2 * N)); at += 2 * N; return read(a, packed.scales[scale++]); };
    const ranks = () => {
      const size = data.rank_bytes * N, part = buffer.slice(at, at + size);
      at += size;
      const a = data.rank_bytes === 2 ? new Uint16Array(part) : new Uint32Array(part);
      return (i) => a[i];
    };
    details.set(place, Array.from({ length: H }, () => {
      const head = { weight: floats(), distance: floats(), score: [], rank: [] };
      for (let m = 0; m < data.methods.length; m++) { head.score.push(floats()); head.rank.push(ranks()); }
      return head;
    }));
  }
  return details.get(place);
}

// ---- shares ----------------------------------------------------------------------------------------------------

const range = (chosen, all) => (chosen < 0 ? Array.from({ length: all }, (_, i) => i) : [chosen]);
const shareCache = new Map();

function share(m) { // Float32Array [N]: of the chosen layers and heads, how many keep each token
  const key = [m, state.layer, state.head].join();
  if (!shareCache.has(key)) {
    if (shareCache.size > 24) shareCache.clear();
    const counts = new Float32Array(N), layers = range(state.layer, L), heads = range(state.head, H);
    for (const l of layers) for (const h of heads) for (let i = 0; i < N; i++) counts[i] += keeps(m, l, h, i);
    shareCache.set(key, counts.map((c) => c / (layers.length * heads.length)));
  }
  return shareCache.get(key);
}

// ---- the text --------------------------------------------------------------------------------------------------

const regions = [];

function buildRegions() {
  for (let start = 0; start < N; start += REGION) {
    const stop = Math.min(N, start + REGION);
    const section = document.createElement("section"), button = document.createElement("button"), body = document.createElement("div");
    section.className = "region";
    body.className = "body";
    button.type = "button";
    const region = { start, stop, section, button, body, spans: null };
    let characters = 0;
    for (let i = start; i < stop; i++) characters += data.pieces[i].length + 14 * (data.pieces[i].split("\n").length - 1);
    body.style.minHeight = Math.ceil(characters / 85) * 26 + "px";
    button.addEventListener("click", () => select(start));
    section.append(button, body);
    byId("text").append(section);
    section.region = region;
    regions.push(region);
  }
  const seen = new IntersectionObserver((entries) => {
    for (const e of entries) e.isIntersecting ? fill(e.target.region) : empty(e.target.region);
  }, { rootMargin: "900px 0px" });
  for (const r of regions) seen.observe(r.section);
}

function fill(region) {
  if (region.spans) return;
  region.spans = [];
  for (let i = region.start; i < region.stop; i++) {
    const span = document.createElement("span");
    span.dataset.i = i;
    span.textContent = data.pieces[i] === "" ? "·" : data.pieces[i];
    region.spans.push(span);
  }
  region.body.replaceChildren(...region.spans);
  region.body.style.minHeight = "";
  paint(region);
}

function empty(region) {
  if (!region.spans) return;
  region.body.style.minHeight = region.body.offsetHeight + "px";
  region.body.replaceChildren();
  region.spans = null;
}

function look(i, a, b) { // class and background of a token
  if (state.ink === "missed") {
    const most = data.methods[state.method].missed.length ? data.methods[state.method].missed[0][1] : 0;
    const part = most ? Math.sqrt(missed[state.method](i) / most) : 0;
    return [part > 0.3 ? "t b" : "t", part > 0 ? `rgba(var(--b), ${(0.6 * part).toFixed(3)})` : ""];
  }
  if (!b) return [a[i] > 0 ? "t" : "t none", a[i] > 0 ? `rgba(var(--a), ${(0.22 + 0.58 * a[i]).toFixed(3)})` : ""];
  const more = Math.max(a[i], b[i]), difference = a[i] - b[i];
  if (more === 0) return ["t none", ""];
  const alpha = (0.22 + 0.58 * more).toFixed(3);
  if (Math.abs(difference) <= 0.1 * more) return ["t both", `rgba(128, 128, 128, ${alpha * 0.6})`];
  return difference > 0 ? ["t a", `rgba(var(--a), ${alpha})`] : ["t b", `rgba(var(--b), ${alpha})`];
}

function paint(region) {
  const a = share(state.method), b = state.other < 0 ? null : share(state.other);
  let kept = 0;
  for (let i = region.start; i < region.stop; i++) kept += a[i];
  kept /= region.stop - region.start;
  region.button.innerHTML = `<span class="bar"><i style="width:${100 * kept}%"></i></span>tokens ${region.start.toLocaleString("en")}–${(region.stop - 1).toLocaleString("en")}: ${percent(kept)} kept`;
  if (!region.spans) return;
  for (const span of region.spans) {
    const i = Number(span.dataset.i), [name, background] = look(i, a, b);
    span.className = name + (data.pieces[i] === "" ? " special" : "") + (i === state.token ? " here" : "");
    span.style.background = background;
  }
}

// ---- the map ---------------------------------------------------------------------------------------------------

// cividis, which looks the same to colour-blind eyes, at nine places
const CIVIDIS = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120], [165, 156, 116], [195, 179, 105], [253, 231, 55]];

function colour(x) {
  const at = Math.min(0.9999, Math.max(0, x)) * (CIVIDIS.length - 1), i = Math.floor(at), part = at - i;
  return CIVIDIS[i].map((c, n) => Math.round(c + part * (CIVIDIS[i + 1][n] - c)));
}

function paintMap() {
  const canvas = byId("heat"), width = Math.min(N, Math.max(300, canvas.clientWidth)), heads = range(state.head, H);
  const sums = new Float32Array(width * L), per = new Float32Array(width);
  for (let i = 0; i < N; i++) per[Math.floor((i * width) / N)] += heads.length;
  for (let l = 0; l < L; l++) for (const h of heads) for (let i = 0; i < N; i++) sums[l * width + Math.floor((i * width) / N)] += keeps(state.method, l, h, i);
  const row = Math.max(3, Math.floor(canvas.clientHeight / L));
  canvas.width = width;
  canvas.height = row * L;
  const context = canvas.getContext("2d"), image = context.createImageData(width, row * L);
  for (let y = 0; y < row * L; y++) for (let x = 0; x < width; x++) {
    const [r, g, b] = colour(Math.sqrt(sums[Math.floor(y / row) * width + x] / per[x]));
    image.data.set([r, g, b, 255], 4 * (y * width + x));
  }
  context.putImageData(image, 0, 0);
  if (state.layer >= 0) { context.strokeStyle = "#fff"; context.strokeRect(0.5, state.layer * row + 0.5, width - 1, Math.max(2, row - 1)); }
  if (state.token >= 0) { context.fillStyle = "#fff"; context.fillRect(Math.floor((state.token * width) / N), 0, 1, row * L); }
  const what = `${data.methods[state.method].short}: layers ${data.layers[0]} (top) to ${data.layers[L - 1]}, the prompt from left to right`;
  canvas.setAttribute("aria-label", "Heat map. " + what);
  const scale = document.createElement("i");
  scale.className = "scale";
  scale.style.background = `linear-gradient(90deg, ${CIVIDIS.map((c) => `rgb(${c})`).join()})`;
  byId("heat-note").replaceChildren("dropped ", scale, " kept by every head (square-root scale). ", what + ". Click to go there.");
}

// ---- panels ----------------------------------------------------------------------------------------------------

const cell = (tag, text) => { const e = document.createElement(tag); e.textContent = text; return e; };

function tableOf(head, rows) {
  const table = document.createElement("table"), line = (tag, cells) => { const tr = document.createElement("tr"); tr.append(...cells.map((c) => cell(tag, c))); return tr; };
  table.append(line("th", head), ...rows.map((r) => line("td", r)));
  return table;
}

async function showToken(i) {
  const body = byId("token-body"), key = JSON.stringify(state) + i;
  showToken.latest = key;
  if (i < 0) return;
  const methods = state.other < 0 ? [state.method] : [state.method, state.other];
  const parts = [cell("p", `Token ${i.toLocaleString("en")} of ${N.toLocaleString("en")}: ${JSON.stringify(data.pieces[i])}`)];
  const scope = state.layer < 0 ? "all layers" : "layer " + data.layers[state.layer];
  for (const m of methods) parts.push(cell("p", `${data.methods[m].short}: kept by ${percent(share(m)[i])} of the heads (${scope})`));
  if (state.layer < 0) parts.push(cell("p", "Choose a layer for score, weight, distance and rank."));
  else {
    const heads = await detail(state.layer);
    if (showToken.latest !== key) return;
    if (!heads) {
      const carried = Object.keys(data.details).map((p) => data.layers[p]).join(", ");
      parts.push(cell("p", `This page carries the numbers of layers ${carried}; of this one only what was kept.`));
    } else {
      for (const m of methods) {
        const rows = range(state.head, H).map((h) => [h, number(heads[h].weight(i)), number(heads[h].distance(i)), number(heads[h].score[m](i)), (heads[h].rank[m](i) + 1).toLocaleString("en"), keeps(m, state.layer, h, i) ? "kept" : "dropped"]);
        const table = tableOf(["head", "weight", "distance", "score", "rank", ""], rows);
        table.dataset.method = data.methods[m].short;
        parts.push(cell("p", data.methods[m].short + ":"), table);
      }
      parts.push(cell("p", "Weight: mean softmax weight over the window's rows. Distance: mean ‖a − v‖. Rank: by pooled score, 1 is kept first."));
    }
  }
  parts.forEach((p, n) => { if (p.tagName === "P" && n > 0) p.className = "note"; });
  body.replaceChildren(...parts);
}

function showLegend() {
  const row = (name, background, text) => { const p = document.createElement("p"), s = cell("span", "token"); s.className = name + " swatch"; s.style.background = background; p.append(s, text); return p; };
  const a = data.methods[state.method].short, rows = [];
  if (state.ink === "missed") rows.push(row("t b", "rgba(var(--b), .6)", `dropped by ${a}, and the answer would have looked at it`));
  else if (state.other < 0) rows.push(row("t", "rgba(var(--a), .8)", `kept by every chosen head of ${a}`), row("t", "rgba(var(--a), .3)", "kept by few"), row("t none", "", "dropped"));
  else {
    const b = data.methods[state.other].short + (state.other === state.method ? " (the same)" : "");
    rows.push(row("t a", "rgba(var(--a), .5)", `more heads of ${a}`), row("t b", "rgba(var(--b), .5)", `more heads of ${b}`), row("t both", "rgba(128, 128, 128, .3)", "equally many"), row("t none", "", "dropped by both"));
  }
  byId("legend").replaceChildren(...rows);
}

function showAnswers() {
  const answer = (name, text) => { const div = document.createElement("div"); div.className = "answer"; div.append(cell("b", name), text || "(nothing)"); return div; };
  byId("answers").replaceChildren(answer("full cache", data.full_answer), ...data.methods.map((m) => answer(m.short, m.answer)));
}

function showMissed() {
  const m = data.methods[state.method];
  const note = cell("p", `${percent(m.missed_share)} of the weight that this answer's tokens give the prompt, with nothing evicted, falls on tokens that ${m.short} dropped. The heaviest:`);
  note.className = "note";
  const lines = m.missed.map(([i, weight, layer, head, there]) => {
    const line = document.createElement("button"), around = (from, to) => data.pieces.slice(Math.max(0, from), to).join("").replace(/\s+/g, " ");
    line.type = "button";
    line.className = "missed";
    const token = data.pieces[i].replace(/\s+/g, " ");
    line.append("…" + around(i - 8, i) + (token.startsWith(" ") ? " " : ""), cell("mark", token.trim() || "·"), around(i + 1, i + 6) + "… ", cell("span", `${number(100 * weight)} % over all heads, ${number(100 * there)} % in layer ${layer} head ${head}`));
    line.lastChild.className = "note";
    line.addEventListener("click", () => { state.layer = data.layers.indexOf(layer); state.head = head; select(i); });
    return line;
  });
  byId("missed").replaceChildren(note, ...lines);
}

function showSpans() {
  const m = data.methods[state.method];
  if (!m.spans.length) return byId("spans").replaceChildren(cell("p", `${m.short} protects nothing.`));
  const rows = m.spans.map((s) => [`${s.name} ${s.start}–${s.stop - 1}`, s.bought.toFixed(1), percent(s.share), s.lost === null ? "–" : percent(s.lost)]);
  const note = cell("p", "Tokens of the span that a head keeps only because the span is protected, their share of what it keeps, and the share of all score that the tokens in whose place they stay have; means over all heads.");
  note.className = "note";
  byId("spans").replaceChildren(tableOf(["span", "tokens per head", "of kept", "score lost"], rows), note);
}

// ---- state -----------------------------------------------------------------------------------------------------

function select(i) {
  state.token = Math.max(0, Math.min(N - 1, i));
  const region = regions[Math.floor(state.token / REGION)];
  fill(region);
  update();
  region.spans[state.token - region.start].scrollIntoView({ block: "center" });
}

function fillControls() {
  const options = (id, list) => byId(id).replaceChildren(...list.map(([value, text]) => { const o = cell("option", text); o.value = value; return o; }));
  options("method", data.methods.map((m, i) => [i, m.short]));
  options("other", [[-1, "nothing"], ...data.methods.map((m, i) => [i, m.short])]);
  options("layer", [[-1, "all"], ...data.layers.map((l, i) => [i, l + (data.details[i] ? "" : " (kept only)")])]);
  options("head", [[-1, "all"], ...Array.from({ length: H }, (_, h) => [h, h])]);
  for (const id of ["method", "other", "layer", "head"]) byId(id).addEventListener("change", (e) => { state[id] = Number(e.target.value); update(); });
  byId("ink").addEventListener("change", (e) => { state.ink = e.target.value; update(); });
  byId("controls").addEventListener("submit", (e) => e.preventDefault());
}

function update() {
  for (const id of ["method", "other", "layer", "head", "ink"]) byId(id).value = state[id];
  for (const region of regions) paint(region);
  paintMap();
  showLegend();
  showMissed();
  showSpans();
  showToken(state.token);
  byId("circumstances").textContent = `${N.toLocaleString("en")} tokens, ${data.n_keep.toLocaleString("en")} kept per head (budget ${data.budget}), ${L} layers × ${H} KV heads. ${data.methods[state.method].name}`;
  const parts = Object.entries(state).filter(([k, v]) => v !== (k === "ink" ? "kept" : k === "method" ? 0 : -1)).map(([k, v]) => `${k}=${v}`);
  history.replaceState(null, "", parts.length ? "#" + parts.join("&") : location.pathname);
}

const cycle = (value, step, low, count) => ((value - low + step + count) % count) + low;
const KEYS = {
  "[": () => (state.layer = cycle(state.layer, -1, -1, L + 1)), "]": () => (state.layer = cycle(state.layer, 1, -1, L + 1)),
  ",": () => (state.head = cycle(state.head, -1, -1, H + 1)), ".": () => (state.head = cycle(state.head, 1, -1, H + 1)),
  m: () => (state.method = cycle(state.method, 1, 0, data.methods.length)), b: () => (state.other = cycle(state.other, 1, -1, data.methods.length + 1)),
  i: () => (state.ink = state.ink === "kept" ? "missed" : "kept"),
};

function listen() {
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.target.tagName === "SELECT") return;
    if (KEYS[e.key]) { KEYS[e.key](); update(); }
    else if (e.key === "ArrowRight" || e.key === "ArrowLeft") { e.preventDefault(); select(state.token + (e.key === "ArrowRight" ? 1 : -1)); }
  });
  const at = (e) => (e.target.dataset && e.target.dataset.i !== undefined ? Number(e.target.dataset.i) : -1);
  byId("text").addEventListener("mouseover", (e) => { if (at(e) >= 0) showToken(at(e)); });
  byId("text").addEventListener("mouseleave", () => showToken(state.token));
  byId("text").addEventListener("click", (e) => { if (at(e) >= 0) select(at(e)); });
  byId("heat").addEventListener("click", (e) => {
    const box = byId("heat").getBoundingClientRect();
    state.layer = Math.min(L - 1, Math.floor(((e.clientY - box.top) / box.height) * L));
    select(Math.floor(((e.clientX - box.left) / box.width) * N));
  });
  window.addEventListener("resize", paintMap);
}

async function start() {
  byId("heading").textContent = `${data.model}: what was kept, what was dropped`;
  for (const m of data.methods) {
    bits.push(new Uint8Array(await inflate(m.kept)));
    missed.push(read(new Uint16Array(await inflate(m.missed_weight.bytes)), m.missed_weight.scales[0]));
  }
  for (const [k, v] of new URLSearchParams(location.hash.slice(1))) if (k in state) state[k] = k === "ink" ? v : Number(v);
  fillControls();
  buildRegions();
  listen();
  showAnswers();
  if (state.token >= 0) select(state.token); else update();
  document.body.dataset.ready = "yes";
}

start();
