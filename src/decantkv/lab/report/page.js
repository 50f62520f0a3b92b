// The address says what is shown: #folder/length/regime/task, and /method/budget when the answers of a point are open.
const FEW = 6;  // methods drawn at first where there are many; the legend switches the others on
const ALWAYS = ["dropkv", "random"];  // beside those few: what others are compared with, and the control
const at = id => document.getElementById(id);

function make(tag, attributes, ...children) {
  const made = Object.assign(document.createElement(tag), attributes);
  made.append(...children);
  return made;
}

async function unpack(id) {
  const bytes = Uint8Array.from(atob(at(id).textContent), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const address = (...parts) => "#" + parts.map(encodeURIComponent).join("/");
const wide = table => make("div", { className: "wide" }, table);
const line = (tag, texts) => make("tr", {}, ...texts.map(text => make(tag, {}, text ?? "")));

let folders, folder, panel, task, drawn;
const colours = new Map();  // method -> its number among those drawn, which gives its colour and mark
const chosen = {};  // folder id -> the methods that a reader switched on

// From the address to a folder, a panel and a task; what is not there gives way to the first that is.
function find() {
  const [id, length, regime, wanted] = location.hash.slice(1).split("/").map(decodeURIComponent);
  const size = f => f.panels.reduce((sum, p) => sum + p.points.length, 0);
  const largest = folders.reduce((a, b) => (size(b) > size(a) ? b : a));
  folder = folders.find(f => f.id === id) ?? largest;
  const narrowed = (panels, fits) => (panels.some(fits) ? panels.filter(fits) : panels);
  const oneLength = narrowed(folder.panels, p => `${p.length}` === length);
  panel = narrowed(oneLength, p => p.regime === regime)[0];
  task = panel && Object.hasOwn(panel.tasks, wanted) ? wanted : "";
}

function options(select, values, texts, value) {
  select.replaceChildren(...values.map((v, i) => make("option", { value: v, textContent: texts[i] })));
  select.value = value;
}

function show() {
  find();
  const wanted = address(folder.id, panel?.length, panel?.regime, task);
  if (drawn !== wanted) draw();
  drawn = wanted;
  openAnswers();
}

function draw() {
  const names = folders.map(f => `${f.folder.split("/").pop()}: ${f.title}`);
  options(at("folder"), folders.map(f => f.id), names, folder.id);
  at("title").textContent = folder.title;
  const about = [folder.about, `${folder.prompts} prompts`, `rows in ${folder.folder}`, `weights ${folder.weights}`];
  if (folder.yarn !== 1) about.push(`RoPE stretched by YaRN ×${folder.yarn}`);
  at("about").textContent = about.join(", ");
  fill(at("repeat"));
  at("panel").hidden = !panel;
  if (panel) drawPanel();
}

function drawPanel() {
  const lengths = [...new Set(folder.panels.map(p => p.length))], tasks = Object.keys(panel.tasks);
  const regimes = folder.panels.filter(p => p.length === panel.length).map(p => p.regime);
  options(at("length"), lengths, lengths.map(n => n.toLocaleString("en")), panel.length);
  options(at("regime"), regimes, regimes, panel.regime);
  options(at("task"), ["", ...tasks], ["all tasks", ...tasks], task);
  const regime = make("span", { className: "regime" }, panel.regime);
  at("what").replaceChildren(`${panel.length.toLocaleString("en")} tokens, ${task || "all tasks"} `, regime);
  at("explains").textContent = at("explain-" + panel.regime).textContent;
  const left = `Not in the averages, the full cache itself being below 0.3: ${panel.left_out}`;
  at("left-out").textContent = panel.left_out && left;
  at("by-task").hidden = tasks.length < 2;
  at("versus").hidden = !panel.versus.length;
  fill(at("versus"));
  legend();
  table();
}

// The few that lie on average least below the best at their budget (the best of each family before its other variants),
// those always drawn, and those without a budget.
function few() {
  const below = new Map();
  for (const budget of new Set(panel.points.map(p => p.budget))) {
    const here = panel.points.filter(p => p.budget === budget && budget !== "-"), sign = panel.scored ? 1 : -1;
    const best = Math.max(...here.map(p => sign * p.score[0]));
    here.forEach(p => below.set(p.method, [...(below.get(p.method) ?? []), best - sign * p.score[0]]));
  }
  const mean = distances => distances.reduce((a, b) => a + b) / distances.length;
  const ranked = [...below.keys()].sort((a, b) => mean(below.get(a)) - mean(below.get(b)));
  const family = method => method.split(/[[:+]/)[0];
  const leads = ranked.filter(m => ranked.find(other => family(other) === family(m)) === m);
  const whole = panel.points.map(p => p.method).filter(m => !below.has(m));
  const first = [...new Set([...leads, ...ranked])].slice(0, FEW);
  return new Set(ranked.length <= 2 * FEW ? [...ranked, ...whole] : [...first, ...ALWAYS, ...whole]);
}

// Those drawn keep their colours; a new one takes the first that is free, so that twelve never share any.
function colour(shown) {
  [...colours.keys()].filter(m => !shown.has(m)).forEach(m => colours.delete(m));
  for (const method of [...shown].filter(m => !colours.has(m))) {
    const taken = new Set(colours.values());
    colours.set(method, [...Array(taken.size + 1).keys()].find(n => !taken.has(n)));
  }
}

function legend() {
  const here = folder.methods.filter(m => panel.points.some(p => p.method === m)).toSorted();
  const shown = chosen[folder.id] ?? few();
  colour(new Set(here.filter(m => shown.has(m))));
  const choose = methods => { chosen[folder.id] = methods; legend(); };
  const button = (text, methods) => make("button", { type: "button", onclick: () => choose(methods) }, text);
  const boxes = here.map(method => {
    const box = make("input", { type: "checkbox", checked: shown.has(method), value: method });
    box.onchange = () => {
      box.checked ? shown.add(method) : shown.delete(method);
      choose(shown);
      document.querySelector(`#legend input[value="${CSS.escape(method)}"]`).focus();
    };
    const number = colours.get(method), drawn = number !== undefined;
    const key = svg("svg", { viewBox: "-7 -7 14 14", class: `key ${drawn ? colourOf(number) : "off"}` }, mark(number ?? 0, 0, 0));
    return make("label", {}, box, key, method);
  });
  const buttons = [button("the best few"), button("all", new Set(here)), button("none", new Set())];
  at("legend").replaceChildren(make("span", { className: "buttons" }, ...buttons), ...boxes);
  charts();
}

function charts() {
  at("chart").replaceChildren();  // its width is the page's, not that of a chart drawn before
  at("chart").replaceChildren(oneChart(task, at("chart").clientWidth - 16));
  fill(at("by-task"));
}

function oneChart(of, width) {
  const on = new Set([...document.querySelectorAll("#legend input:checked")].map(box => box.value));
  const drawable = p => (of ? p.by_task[of] : p.score)?.every(Number.isFinite);
  const shown = panel.points.filter(p => on.has(p.method) && drawable(p));
  const points = shown.map(p => ({
    name: p.method, x: p.bytes, score: of ? p.by_task[of] : p.score, aside: p.budget !== "-",
    title: `${p.method} at ${p.budget}: ${valueOf(p, of)}`,
    link: address(folder.id, panel.length, panel.regime, of, p.method, p.budget),
  }));
  const lines = folder.methods.map(name => ({ name, number: colours.get(name), points: points.filter(p => p.name === name) }));
  return chart(lines.filter(l => l.points.length), panel.label, of ? panel.tasks[of] : panel.full, width);
}

// A point's value with its interval: of one task, or of all.
function valueOf(point, of) {
  if (!of) return point.texts[2];
  const [mean, low, high] = point.by_task[of].map(x => x?.toFixed(3));
  return `${mean} [${low}, ${high}]`;
}

// With a task chosen, the columns that average over tasks go.
function table() {
  const head = ["method", "budget", "bytes", "KV memory", `${panel.label} [95 %]`];
  const rest = ["− dropkv [95 %]", "worst task", "lose >10 %", "Δ length", "n"];
  const rows = panel.points.filter(p => !task || p.by_task[task]).map((p, i, all) => {
    const [bytes, memory, , ...others] = p.texts;
    const row = line("td", ["", p.budget, bytes, memory, valueOf(p, task), ...(task ? [] : others)]);
    const href = address(folder.id, panel.length, panel.regime, task, p.method, p.budget);
    row.firstChild.append(make("a", { href }, p.method));
    if (!task && p.clear) row.children[5].className = "clear";
    if (i && all[i - 1].budget !== p.budget) row.className = "next";
    return row;
  });
  const made = make("table", { className: "points" }, line("th", task ? head : [...head, ...rest]), ...rows);
  at("table").replaceChildren(made);
}

// A folded part is written when it is open, and again when what it shows changes.
function fill(details) {
  const parts = { repeat: sessions, "by-task": smallCharts, versus: matrices };
  const body = details.lastElementChild;
  body.replaceChildren(...(details.open && (panel || details.id === "repeat") ? parts[details.id]() : []));
}

function smallCharts() {
  return Object.keys(panel.tasks).map(of => make("div", { className: "card" }, make("h4", {}, of), oneChart(of, 320)));
}

function matrices() {
  const explained = "row minus column on the same prompts; * the interval is clear of 0.";
  return panel.versus.flatMap(([budget, names, differences]) => [
    make("p", { className: "dim" }, `Budget ${budget}, regime ${panel.regime}, all tasks: ${explained}`),
    wide(make("table", { className: "matrix" }, line("th", ["", ...names]), ...differences.map((texts, i) => {
      const row = line("td", texts);
      row.prepend(make("th", {}, names[i]));
      return row;
    }))),
  ]);
}

function sessions() {
  return folder.sessions.map(one => {
    const listed = (of, between) => Object.entries(of ?? {}).map(pair => pair.join(between));
    const made = `${one.begun}, ${one.device}, ${listed(one.versions, " ").join(", ")}`;
    return make("pre", {}, [one.command, made, ...listed(one.policies, ": ")].join("\n"));
  });
}

let held = {};  // the answers unpacked last
async function openAnswers() {
  const here = location.hash, [method, budget] = here.split("/").slice(4).map(decodeURIComponent);
  const point = panel?.points.find(p => p.method === method && p.budget === budget);
  at("answers").className = "";
  if (!point) return;
  const id = `answers-${folder.id}-${panel.length}`;
  if (held.id !== id) held = { id, data: await unpack(id) };
  if (location.hash !== here) return;
  const rows = answersOf(held.data, point);
  const head = ["prompt", "here", "full", "answer", "full cache’s answer", "wanted"];
  const made = make("table", {}, line("th", head), ...rows.map(texts => line("td", texts)));
  const title = `${method} at ${budget}, ${task || "all tasks"}: ${valueOf(point, task)}`;
  const close = make("button", { type: "button" }, "close");
  close.onclick = () => { location.hash = here.split("/").slice(0, 4).join("/"); };
  const said = make("p", {}, `${title} — ${rows.length} answers, largest changes first`);
  at("answers").replaceChildren(close, said, made);
  at("answers").className = "open";
  at("answers").scrollTo(0, 0);
}

function answersOf(data, point) {
  const column = wanted => data.cells.findIndex(cell => cell.join() === wanted.join());
  const mine = column([panel.regime, point.method, point.budget]), full = column(["any", "full", "1"]);
  const rows = data.prompts.flatMap((prompt, i) => {
    const [given, before] = [data.given[i][mine], data.given[i][full]];
    if (given < 0 || (task && data.tasks[i] !== task)) return [];
    const [answers, values] = [data.answers[i], data.values[i]];
    return [[prompt, values[given], values[before], answers[given], answers[before], data.wanted[i]]];
  });
  return rows.sort((a, b) => Math.abs(b[1] - b[2]) - Math.abs(a[1] - a[2]));
}

function choose() {
  const names = ["folder", "length", "regime", "task"];
  location.hash = address(...names.map(name => at(name).value));
}

unpack("sections").then(all => {
  folders = all;
  document.querySelectorAll("select").forEach(select => { select.onchange = choose; });
  document.querySelectorAll("details[id]").forEach(details => { details.ontoggle = () => fill(details); });
  addEventListener("hashchange", show);
  show();
});
