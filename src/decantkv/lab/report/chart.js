// A line per method over the share of bytes kept (logarithmic): points with intervals, each a link to its answers.
const LEFT = 54, RIGHT = 20, TOP = 28, BOTTOM = 46;
const COLOURS = 12;  // of the palette; beyond it a colour comes again, dashed and with another mark
const SPREAD = 24;  // methods of one budget stand side by side over so many units, or their intervals hide each other

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const colourOf = number => `c${number % COLOURS}`;

function mark(number, x, y) {
  const shape = [
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "M-3.5 -3.5h7v7h-7z", "M0 -5l5 5l-5 5l-5 -5z", "M0 -5l5 8h-10z",
  ][(number + Math.floor(number / COLOURS)) % 4];
  return svg("path", { d: shape, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` });
}

// lines: [{name, number, points: [{x, score: [mean, low, high], link, title, aside}]}]; full: a dashed line, or null;
// width in pixels, so that letters have their size on a phone too
function chart(lines, label, full, width) {
  const points = lines.flatMap(line => line.points), height = Math.round(Math.min(400, 0.75 * width));
  const right = width - RIGHT, floor = height - BOTTOM;
  const lowX = 0.9 * Math.min(0.04, ...points.map(p => p.x));
  const top = roundedUp(Math.max(...points.map(p => p.score[2]), full ?? 0));
  const atX = x => LEFT + (1 - Math.log(x) / Math.log(lowX)) * (right - LEFT);
  const atY = y => TOP + (1 - Math.min(Math.max(y, 0), top) / top) * (floor - TOP);
  const said = `${label} against bytes kept`;
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": said });
  drawn.append(...axes(atX, atY, right, floor, lowX, top, label));
  if (full !== null) {
    const y = atY(full);
    drawn.append(
      svg("line", { class: "full", x1: LEFT, x2: right, y1: y, y2: y }),
      svg("line", { class: "full", x1: LEFT, x2: LEFT + 22, y1: 11, y2: 11 }),  // its key
      svg("text", { x: LEFT + 28, y: 11, dy: ".35em" }, `full cache ${full.toFixed(2)}`));
  }
  lines.forEach((line, i) => {
    const aside = lines.length > 1 ? SPREAD * (i / (lines.length - 1) - 0.5) : 0;
    const placed = line.points.toSorted((a, b) => a.x - b.x).map(p => ({ ...p, x: atX(p.x) + (p.aside ? aside : 0) }));
    const path = placed.map(p => `${p.x.toFixed(1)},${atY(p.score[0]).toFixed(1)}`).join(" ");
    const again = line.number < COLOURS ? {} : { "stroke-dasharray": "7 3" };
    const group = svg("g", { class: colourOf(line.number) }, svg("polyline", { points: path, ...again }));
    for (const p of placed) {
      const [y, low, high] = p.score.map(atY);
      group.append(
        svg("line", { class: "bar", x1: p.x, x2: p.x, y1: low, y2: high }),
        svg("a", { href: p.link }, svg("title", {}, p.title), mark(line.number, p.x, y)));
    }
    drawn.append(group);
  });
  return drawn;
}

function axes(atX, atY, right, floor, lowX, top, label) {
  const made = [], named = [];
  for (const share of [1, 0.1, 0.3, 0.05, 0.5, 0.01, 0.2, 0.02].filter(share => share >= lowX)) {
    const x = atX(share);
    made.push(svg("line", { class: "grid", x1: x, x2: x, y1: TOP, y2: floor }));
    if (named.some(other => Math.abs(other - x) < 33)) continue;  // no room for its text
    made.push(svg("text", { x, y: floor + 4, dy: "1em", "text-anchor": "middle" }, `${share * 100}%`));
    named.push(x);
  }
  for (const value of [0, 1, 2, 3, 4].map(i => (top * i) / 4)) {
    const y = atY(value);
    made.push(svg("line", { class: "grid", x1: LEFT, x2: right, y1: y, y2: y }));
    made.push(svg("text", { x: LEFT - 6, y, dy: ".35em", "text-anchor": "end" }, `${+value.toPrecision(3)}`));
  }
  const middle = (LEFT + right) / 2, up = `translate(14 ${(TOP + floor) / 2}) rotate(-90)`;
  made.push(svg("text", { x: middle, y: floor + 38, "text-anchor": "middle" }, "share of the cache’s bytes kept"));
  made.push(svg("text", { transform: up, "text-anchor": "middle" }, label));
  return made;
}

// The next number whose quarters read well; 1 for scores.
function roundedUp(x) {
  if (x <= 0 || (x > 0.5 && x <= 1)) return 1;
  const power = 10 ** Math.floor(Math.log10(x));
  return power * [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10].find(step => step * power >= x);
}
