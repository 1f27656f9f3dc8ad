// Draws the plan: a picture, a caption and a table for each question. `makePlan` computes all numbers, Plot draws.
"use strict";

const view = JSON.parse(document.getElementById("view").textContent);
const { Plot } = drawing;
const plan = makePlan(view, drawing.blake2b);
const { order } = view;
const meshes = [view.mesh, ...view.meshes];

const MOST_ROWS = 1000; // of a table
const MOST_BOXES = 24; // in a column of the picture of a step
const MOST_RANKS = 1024; // of a mesh
const EVALUATED = 8192; // positions of the heatmap
const number = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 3 });
const short = (value) => value.toLocaleString("en-US", { notation: "compact" });
const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
const byId = (id) => document.getElementById(id);
const last = (epoch) => Math.max(0, plan.epochOf(epoch).steps - 1);
const state = { epoch: 0, step: 0 };

// Colours: ten that are told apart, or a scale for more data ranks. The numbers are always written, too.
function colours(domain) {
  if (domain.length > 10) {
    const scale = Plot.scale({ color: { type: "linear", scheme: "turbo", domain: [-1, domain.length] } });
    return (one) => scale.apply(domain.indexOf(one));
  }
  return Plot.scale({ color: { type: "categorical", scheme: "observable10", domain } }).apply;
}
const ranksInOrder = Array.from({ length: Math.max(...meshes.map((one) => one.count)) }, (_, rank) => rank);
const colourOfRank = colours(ranksInOrder);
const colour = (rank) => (rank === null ? "var(--mixed)" : colourOfRank(rank)); // null: nobody knows
for (const mesh of meshes) {
  mesh.byRank = new Map([null, ...ranksInOrder.slice(0, mesh.count)].map((rank) => [rank, []])); // its global ranks
  mesh.ranks.forEach((rank, at) => mesh.byRank.get(mesh.dataRanks[at]).push(rank));
}
const isDealt = view.dealt || view.stretches.some((one) => one.dealt);
const unknown = isDealt ? "dealt by cost" : "another mesh";

/** Who reads the step that is shown. */
const reader = () =>
  plan.epochOf(state.epoch).steps ? plan.extent(state.epoch, state.step).reader : { mesh: view.mesh };

/** Black or white, whichever can be read on a colour. */
function onColour(fill) {
  const parts = fill.startsWith("#")
    ? fill.match(/[0-9a-f]{2}/gi).map((two) => parseInt(two, 16))
    : fill.match(/[\d.]+/g);
  return 0.3 * parts[0] + 0.59 * parts[1] + 0.11 * parts[2] > 130 ? "#000" : "#fff";
}

const nameOf = (sample) => (Array.isArray(sample) ? `${order.sources[sample[0]]}:${sample[1]}` : String(sample));

/** Ints as text, stretches of consecutive ones shortened. */
function stretchesOf(values) {
  const found = [];
  for (const value of values) {
    if (found.length && value === found.at(-1)[1] + 1) found.at(-1)[1] = value;
    else found.push([value, value]);
  }
  return found.map(([first, end]) => (first === end ? `${first}` : `${first}–${end}`)).join(", ");
}

/** Those of some labels, given as [pixel, text, ...], that do not lie on the one before. */
function apart(labels) {
  let upto = -Infinity;
  return labels.filter(([at, text]) => at >= upto && ((upto = at + 6.5 * text.length + 4), true));
}

// The pictures

/** Adds a figure. `draw(width)` returns {picture, caption, head, rows, total}; `rows` is a function, asked when shown. */
function figure(name, title, parent, draw) {
  const element = document.createElement("figure");
  element.id = name;
  element.innerHTML = `<header><h2>${title}</h2><button type="button" aria-label="Save the picture “${title}” as SVG">SVG</button></header>
    <figcaption></figcaption><ul class="legend"></ul><div class="picture" tabindex="0" role="group" aria-label="${title}"></div>
    <details><summary>The numbers as a table</summary><div tabindex="0" role="region" aria-label="Table: ${title}"></div></details>`;
  parent.append(element);
  const [caption, details, box] = ["figcaption", "details", ".picture"].map((one) => element.querySelector(one));
  let shown;
  function fill() {
    const table = document.createElement("table");
    const add = (row, kind) => {
      const line = table.insertRow();
      for (const value of row) line.appendChild(document.createElement(kind)).textContent = value;
    };
    add(shown.head, "th");
    const rows = shown.rows();
    rows.slice(0, MOST_ROWS).forEach((row) => add(row, "td"));
    details.lastElementChild.replaceChildren(table);
    if (rows.length > MOST_ROWS)
      details.lastElementChild.append(`The first ${MOST_ROWS} of ${number(rows.length)} rows.`);
  }
  details.addEventListener("toggle", () => details.open && shown && fill());
  details.open = new URLSearchParams(location.hash.slice(1)).has("tables");
  element.querySelector("button").addEventListener("click", () => save(element.querySelector("svg"), name));
  return function update() {
    shown = draw(Math.max(280, box.clientWidth));
    caption.textContent = shown.caption;
    element.querySelector(".legend").replaceChildren(
      ...(shown.legend ?? []).map(([label, fill]) => {
        const item = document.createElement("li");
        item.append(Object.assign(document.createElement("i"), { style: `background:${fill}` }), label);
        return item;
      }),
    );
    shown.picture.setAttribute("role", "img");
    shown.picture.setAttribute("aria-label", `${title} ${shown.caption} The table below has the numbers.`);
    box.replaceChildren(shown.picture);
    if (details.open) fill();
  };
}

/** Saves a picture as it is shown, as a file that needs nothing of the page. */
function save(svg, name) {
  const copy = svg.cloneNode(true);
  const style = getComputedStyle(svg);
  copy.setAttribute(
    "style",
    `color:${style.color};background:${getComputedStyle(document.body).backgroundColor};font:10px sans-serif`,
  );
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  const link = document.createElement("a");
  const text = new XMLSerializer().serializeToString(copy);
  const plain = text.replace(/var\((--\w+)\)/g, (_, variable) => style.getPropertyValue(variable).trim());
  link.href = `data:image/svg+xml,${encodeURIComponent(plain)}`;
  link.download = `${name}.svg`;
  link.click();
}

function drawMesh(width) {
  const { mesh, run } = reader();
  const { axes, shape, ranks, dataRanks: of } = mesh;
  const columns = shape.length > 1 ? shape.at(-1) : Math.min(ranks.length, 16);
  const names = axes.slice(0, -1);
  /** The coordinates along all axes but the last. */
  function rowName(at) {
    if (shape.length === 1) return `${axes[0]} ${at * columns}`;
    const found = [];
    for (let axis = names.length - 1; axis >= 0; axis--) {
      found.unshift(`${names[axis]} ${at % shape[axis]}`);
      at = Math.floor(at / shape[axis]);
    }
    return found.join(", ");
  }
  const cells = ranks.slice(0, MOST_RANKS).map((rank, at) => ({
    rank,
    dataRank: of[at],
    x: at % columns,
    row: rowName(Math.floor(at / columns)),
    fill: colour(of[at]),
  }));
  const rows = [...new Set(cells.map((cell) => cell.row))]; // as they come: Plot would sort "dp 10" before "dp 2"
  const left = 16 + 6.5 * Math.max(...cells.map((cell) => cell.row.length));
  const wide = (width - left) / columns;
  const high = wide > 22 && rows.length <= 64 ? 36 : 20;
  const written =
    high < 36
      ? (d) => (wide > 90 ? `${d.rank}: data rank ${d.dataRank}` : `d${d.dataRank}`)
      : wide > 62
        ? (d) => `rank ${d.rank}\ndata rank ${d.dataRank}`
        : (d) => `${d.rank}\nd${d.dataRank}`;
  const picture = Plot.plot({
    width,
    height: 40 + rows.length * high,
    marginLeft: left,
    marginTop: 30,
    marginBottom: 4,
    x: {
      type: "band",
      label: axes.at(-1),
      axis: "top",
      tickSize: 0,
      padding: 0.05,
      ticks: columns > 32 ? [] : undefined,
    },
    y: { type: "band", label: null, domain: rows, tickSize: 0, padding: 0.05 },
    color: { type: "identity" },
    marks: [
      Plot.cell(cells, { x: "x", y: "row", fill: "fill", title: (d) => `rank ${d.rank}: data rank ${d.dataRank}` }),
      wide > 22 ? Plot.text(cells, { x: "x", y: "row", text: written, fill: (d) => onColour(d.fill) }) : null,
    ],
  });
  const groups = [...mesh.byRank].slice(1).map(([rank, members]) => [rank, members.length, stretchesOf(members)]);
  const replicas = ranks.length / mesh.count;
  const others = axes.filter((axis) => !mesh.dataAxes.includes(axis));
  const caption =
    (run ? `${run}. ` : "") +
    `${count(ranks.length, "rank")} on ${axes.map((axis, at) => `${axis}=${shape[at]}`).join(" × ")}; ` +
    `the batch is split over ${mesh.dataAxes.join(" × ") || "no axis"}: ${count(mesh.count, "data rank")}. ` +
    (replicas > 1
      ? `Each data rank is a group of ${replicas} replicas along ${others.join(" × ")}, which read the same samples. `
      : "") +
    (ranks.length > MOST_RANKS ? `The first ${number(MOST_RANKS)} ranks are drawn.` : "");
  return { picture, caption, head: ["data rank", "replicas", "global ranks"], rows: () => groups };
}

function drawStep(width) {
  const { epoch, step } = state;
  if (!plan.epochOf(epoch).steps)
    return {
      picture: Plot.plot({ width, height: 40, marks: [] }),
      caption: "The epoch has no step.",
      head: [],
      rows: () => [],
    };
  const batch = plan.extent(epoch, step);
  const { mesh, dealt } = batch.reader;
  const { byRank } = mesh;
  // Boxes: rows that follow each other on one data rank, alike; single ones if they are few.
  const single = batch.rows <= 24;
  const looked = Math.min(batch.rows, 4096);
  const boxes = [];
  for (let row = 0; row < looked && boxes.length <= MOST_BOXES; row++) {
    const one = plan.rowAt(epoch, step, row, batch);
    const box = boxes.at(-1);
    if (!single && box && box.dataRank === one.dataRank && box.state === one.state) {
      box.end = row + 1;
      if (box.samples.length < 4) box.samples.push(nameOf(one.sample));
    } else
      boxes.push({ first: row, end: row + 1, dataRank: one.dataRank, state: one.state, samples: [nameOf(one.sample)] });
  }
  boxes.splice(MOST_BOXES);
  const ranks = [...new Set(boxes.map((box) => box.dataRank))].sort((a, b) => a - b);
  const few = ranks.reduce((total, rank) => total + byRank.get(rank).length, 0) <= MOST_BOXES;
  const narrow = width < 520;
  const [x1, x2, x3] = narrow ? [0.44, 0.64, 0.84] : [0.36, 0.62, 0.86];
  const ranksAs = (rank) => {
    const text = `ranks ${stretchesOf(byRank.get(rank))}`;
    return text.length * 6.2 < (1 - x3) * width ? text : count(byRank.get(rank).length, "rank");
  };
  const ends = ranks.flatMap((rank) =>
    few
      ? byRank.get(rank).map((one) => ({ dataRank: rank, text: `rank ${one}` }))
      : [{ dataRank: rank, text: ranksAs(rank) }],
  );
  const place = (list) => list.forEach((one, at) => (one.y = (at + 0.5) / list.length));
  const middles = ranks.map((rank) => ({ dataRank: rank, text: rank === null ? unknown : `data rank ${rank}` }));
  [boxes, middles, ends].forEach(place);
  const middleOf = new Map(middles.map((one) => [one.dataRank, one.y]));
  for (const box of boxes) {
    const rows = box.end - box.first === 1 ? `${box.first}` : `${box.first}–${box.end - 1}`;
    const text = (most) =>
      `${rows}: ${[...box.samples.slice(0, most), ...(box.end - box.first > most ? ["…"] : [])].join(", ")}`;
    const fits = [4, 3, 2, 1].find((most) => text(most).length * 6.2 < x1 * width) ?? 0;
    box.text = text(fits) + (box.state === "real" ? "" : ` (${box.state})`);
  }
  const most = Math.max(boxes.length, ends.length, 3);
  const box = (list, x, wide, anchor) => [
    Plot.text(list, {
      x,
      y: "y",
      text: "text",
      textAnchor: anchor,
      dx: anchor === "end" ? -8 : wide,
      fill: "currentColor",
    }),
    Plot.dot(list, {
      x,
      y: "y",
      r: 5,
      symbol: (d) => (d.state === "padding" ? "times" : d.state === "left out" ? "diamond2" : "circle"),
      fill: (d) => (d.state && d.state !== "real" ? "var(--paper)" : colour(d.dataRank)),
      stroke: (d) => colour(d.dataRank),
      strokeWidth: 1.5,
    }),
  ];
  const besides = middles.length > most / 2 ? { dx: 10, textAnchor: "start" } : { dy: -12 };
  const links = (list, from, to, y1, y2) =>
    Plot.link(list, {
      x1: from,
      x2: to,
      y1,
      y2,
      stroke: (d) => colour(d.dataRank),
      strokeWidth: 1.5,
      strokeOpacity: 0.7,
      strokeDasharray: undefined,
      curve: "bump-x",
    });
  const picture = Plot.plot({
    width,
    height: 44 + most * 19,
    marginTop: 36,
    marginBottom: 4,
    marginLeft: 0,
    marginRight: 0,
    x: { domain: [0, 1], axis: null },
    y: { domain: [0, 1], axis: null, reverse: true },
    color: { type: "identity" },
    symbol: { type: "identity" },
    marks: [
      links(boxes, x1, x2, "y", (d) => middleOf.get(d.dataRank)),
      links(ends, x2, x3, (d) => middleOf.get(d.dataRank), "y"),
      ...box(boxes, x1, 0, "end"),
      ...box(ends, x3, 9, "start"),
      Plot.dot(middles, { x: x2, y: "y", r: 6, fill: (d) => colour(d.dataRank) }),
      Plot.text(middles, {
        x: x2,
        y: "y",
        text: (d) => (narrow && d.dataRank !== null ? `d${d.dataRank}` : d.text),
        ...besides,
        fill: "currentColor",
        stroke: "var(--paper)",
        strokeWidth: 7,
      }),
      Plot.text(
        [
          ["rows: samples", x1, "end", -8],
          ["data ranks", x2, "middle", 0],
          ["global ranks", x3, "middle", narrow ? 0 : 20],
        ],
        {
          x: (d) => d[1],
          frameAnchor: "top",
          dy: -28,
          text: (d) => d[0],
          textAnchor: "middle",
          fill: "var(--quiet)",
        },
      ),
    ],
  });
  const loads = plan.loads(epoch, step);
  const total = (kind) => loads.reduce((all, one) => all + one[kind], 0);
  const hidden =
    boxes.length && boxes.at(-1).end < batch.rows ? ` Rows from ${number(boxes.at(-1).end)} on are not drawn.` : "";
  const kinds = ["padding", "left out"].filter(total).map((kind) => `${number(total(kind))} ${kind}`);
  const caption =
    `Step ${number(step)} of epoch ${epoch}: ${count(batch.rows, "row")} from position ${number(batch.first)} on` +
    (kinds.length ? `, of which ${kinds.join(" and ")}` : "") +
    (batch.microSize < batch.rows ? `, in micro-batches of ${number(batch.microSize)}` : "") +
    (total("real")
      ? plan.isShared(batch)
        ? `. Each data rank reads ${count(batch.rows / mesh.count, "row")}.${hidden}`
        : dealt
          ? `. Rows are dealt by cost (balance=): it is not known here which data rank reads which.${hidden}`
          : `. ${count(mesh.count, "data rank")} cannot share them evenly: they were read on another mesh.${hidden}`
      : ". The loader passes over this step.");
  byId("now").textContent = caption;
  return {
    picture,
    caption,
    head: ["row", "position", "sample", "state", "data rank", "row there", "global ranks"],
    rows: () =>
      Array.from({ length: Math.min(batch.rows, MOST_ROWS + 1) }, (_, row) => {
        const one = plan.rowAt(epoch, step, row, batch);
        return [
          row,
          one.position,
          nameOf(one.sample),
          one.state,
          one.dataRank,
          one.local,
          stretchesOf(byRank.get(one.dataRank)),
        ];
      }),
  };
}

function drawLoads(width) {
  const { epoch, step } = state;
  const { steps, positions, samples } = plan.epochOf(epoch);
  const looked = Math.min(steps, 40, Math.max(3, Math.floor(2e5 / view.batchSize)));
  const from = Math.max(0, Math.min(step - Math.floor(looked / 2), steps - looked));
  const found = Array.from({ length: looked }, (_, at) => {
    const loads = plan.loads(epoch, from + at);
    const real = loads.map((one) => one.real);
    const total = (kind) => loads.reduce((all, one) => all + one[kind], 0);
    return {
      step: from + at,
      real: total("real"),
      padding: total("padding"),
      out: total("left out"),
      ranks: loads.length,
      most: Math.max(...real),
      least: Math.min(...real),
    };
  });
  const kinds = [
    ["real", "var(--mixed)"],
    ["padding", "#c2410c"],
    ["left out", "#7c3aed"],
  ];
  const bars = found.flatMap((one) =>
    kinds.map(([kind], at) => ({ step: one.step, kind, rows: [one.real, one.padding, one.out][at] })),
  );
  const picture = Plot.plot({
    width,
    height: 190,
    marginLeft: 56,
    x: {
      type: "band",
      label: "step",
      ticks: found
        .map((one) => one.step)
        .filter((_, at) => at % Math.ceil(looked / Math.max(2, Math.floor(width / 90))) === 0),
    },
    y: { label: "rows", grid: true, nice: true },
    color: { domain: kinds.map(([kind]) => kind), range: kinds.map(([, fill]) => fill) },
    marks: [
      Plot.barY(bars, {
        x: "step",
        y: "rows",
        fill: "kind",
        order: kinds.map(([kind]) => kind),
        title: (d) => `step ${d.step}: ${d.rows} rows ${d.kind}`,
      }),
      Plot.tickY(found, {
        x: "step",
        y: (d) => d.most * d.ranks,
        stroke: "currentColor",
        strokeDasharray: "2,2",
        title: (d) => `data ranks have ${d.least} to ${d.most} real rows`,
      }),
      Plot.ruleY([0]),
      Plot.text([step], { x: (d) => d, frameAnchor: "top", text: () => "▾", dy: -12, fill: "currentColor" }),
    ],
  });
  const rest = samples - plan.epochOf(epoch).served;
  const end = steps ? plan.extent(epoch, steps - 1) : null;
  const padded = order.padsFirst ? positions - samples : end ? Math.max(0, end.first + end.rows - positions) : 0;
  const caption =
    `The epoch has ${count(padded, "row")} of padding` +
    (order.padsFirst ? " among its positions" : padded ? `, in step ${number(steps - 1)}` : "") +
    (rest > 0 ? `, and ${count(rest, "sample")} that tail='${view.tail}' does not serve` : "") +
    `. Dashes: the real rows that the fullest data rank has, times the data ranks; where a bar ends lower, data ranks have unequal work.` +
    (steps ? ` Steps ${number(from)} to ${number(from + looked - 1)} of ${number(steps)}.` : " There is no step.");
  return {
    picture,
    caption,
    legend: kinds,
    head: ["step", "real rows", "padding", "left out", "most real rows of a data rank", "fewest"],
    rows: () => found.map((one) => [one.step, one.real, one.padding, one.out, one.most, one.least]),
  };
}

// Sample x step. It takes a while if each window of blocks has a table of its own: so in pieces.

const sourceSizes =
  order.sources?.map((_, source) => Math.max(...order.segments.map((one) => one.lengths[source]))) ?? [];
const sourceStarts = sourceSizes.map((_, source) => sourceSizes.slice(0, source).reduce((a, b) => a + b, 0));
const heat = { epoch: null, found: [], done: false };

/** Position number `at` of `many`: one in each stretch of equal length, at another place in each (no pattern fits). */
function positionOf(at, many, positions) {
  if (many >= positions) return at;
  const [first, end] = [Math.floor((at * positions) / many), Math.floor(((at + 1) * positions) / many)];
  return first + Math.floor(((at * 0.6180339887498949) % 1) * (end - first));
}

async function computeHeat(update) {
  const epoch = (heat.epoch = state.epoch);
  Object.assign(heat, { found: [], done: false });
  document.body.dataset.busy = "yes";
  const { positions, steps } = plan.epochOf(epoch);
  const slow = order.kind === "blocks" && order.block_size * order.window <= 4096 && positions > EVALUATED;
  const many = Math.min(positions, slow ? EVALUATED / 4 : EVALUATED);
  for (let at = 0, until = performance.now() + 30; at < many && steps; at++) {
    const position = positionOf(at, many, positions);
    const step = plan.stepOf(epoch, position);
    const batch = plan.extent(epoch, step);
    const row = position - batch.first;
    if (row < batch.rows) heat.found.push({ step, ...plan.rowAt(epoch, step, row, batch) }); // else the tail drops it
    if (performance.now() > until) {
      await new Promise((go) => setTimeout(go));
      if (heat.epoch !== epoch) return;
      until = performance.now() + 30;
    }
  }
  heat.done = true;
  update();
  document.body.dataset.busy = "no";
}

/** Shows the chosen step in the heatmap, which is not drawn again for it. */
function moveHeatLine() {
  heat.line.setAttribute("transform", `translate(${heat.scale.apply(state.step + 0.5)},0)`);
}

function drawHeat(width) {
  const { epoch } = state;
  const { positions, steps, samples } = plan.epochOf(epoch);
  const height = sourceSizes.length ? sourceSizes.reduce((a, b) => a + b) : samples;
  const lineOf = (sample) => (Array.isArray(sample) ? sourceStarts[sample[0]] + sample[1] : sample);
  const all = heat.found.length >= Math.min(positions, plan.epochOf(epoch).served);
  const [perX, perY] = [
    Math.ceil(steps / (width < 520 ? 40 : 64)) || 1,
    height <= 256 && all ? 1 : Math.ceil(height / 80),
  ];
  const cells = new Map();
  for (const one of heat.epoch === epoch ? heat.found : []) {
    if (one.state !== "real") continue;
    const [x, y] = [Math.floor(one.step / perX) * perX, Math.floor(lineOf(one.sample) / perY) * perY];
    const key = `${x},${y}`;
    if (!cells.has(key)) cells.set(key, { x, y, total: 0, of: new Map() });
    const cell = cells.get(key);
    cell.total++;
    cell.of.set(one.dataRank, (cell.of.get(one.dataRank) ?? 0) + 1);
  }
  const most = Math.max(1, ...[...cells.values()].map((cell) => cell.total));
  for (const cell of cells.values()) {
    const [rank, top] = [...cell.of].reduce((a, b) => (b[1] > a[1] ? b : a));
    cell.mixed = top * 2 <= cell.total;
    cell.fill = cell.mixed ? "var(--mixed)" : colour(rank);
    cell.text = [...cell.of]
      .sort((a, b) => a[0] - b[0])
      .map(([one, times]) => `${one ?? unknown}: ${times}`)
      .join(", ");
  }
  const stepOf = (position) => (position >= positions ? steps : plan.stepOf(epoch, position));
  const out = view.skips.stretches
    .filter(([of]) => of === epoch)
    .map(([, first, end]) => ({ x1: stepOf(first), x2: stepOf(end - 1) + 1, text: "left out" }));
  const begun = view.stretches
    .filter((one) => one.epoch === epoch && one.counts !== false)
    .map((one) => ({ x: stepOf(one.first), text: one.run }));
  const named = apart(begun.map((one) => [(one.x / steps) * (width - 82), one.text, one])).map((one) => one[2]);
  const end = steps ? plan.extent(epoch, steps - 1) : null;
  const padded = end && !order.padsFirst && end.first + end.rows > positions;
  const dropped = plan.epochOf(epoch).served < positions;
  const marks = [];
  if (padded || dropped)
    marks.push({
      x1: steps - (padded ? 1 : 0),
      x2: steps + (dropped ? perX : 0),
      text: dropped ? "dropped" : "padding",
    });
  const picture = Plot.plot({
    width,
    height: width < 520 ? 320 : 400,
    marginLeft: 62,
    marginTop: 30,
    x: {
      label: "step",
      domain: [0, steps + (dropped ? perX : 0)],
      tickFormat: short,
      ticks: Math.max(3, Math.floor(width / 90)),
      interval: steps < 10 ? 1 : undefined,
    },
    y: { label: "sample", domain: [height, 0], tickFormat: short, labelArrow: "none" },
    color: { type: "identity" },
    marks: [
      Plot.rect([...out, ...marks], {
        x1: "x1",
        x2: "x2",
        y1: 0,
        y2: height,
        fill: "var(--mixed)",
        fillOpacity: 0.25,
        stroke: "var(--quiet)",
        strokeDasharray: "3,3",
      }),
      Plot.rect(cells.values(), {
        x1: "x",
        x2: (d) => Math.min(d.x + perX, steps),
        y1: "y",
        y2: (d) => Math.min(d.y + perY, height),
        fill: "fill",
        fillOpacity: (d) => 0.3 + (0.7 * d.total) / most,
        title: (d) =>
          `steps ${d.x}–${Math.min(d.x + perX, steps) - 1}, samples ${d.y}–${Math.min(d.y + perY, height) - 1}; times by data rank: ${d.text}`,
        inset: steps / perX < 40 ? 0.25 : 0,
      }),
      Plot.ruleY(sourceStarts.slice(1), { stroke: "var(--paper)", strokeWidth: 1.5 }),
      Plot.text(order.sources ?? [], {
        frameAnchor: "left",
        y: (_, at) => sourceStarts[at] + sourceSizes[at] / 2,
        text: (d) => d,
        dx: 6,
        textAnchor: "start",
        fill: "currentColor",
        stroke: "var(--paper)",
        strokeWidth: 4,
      }),
      Plot.ruleX(begun, { x: "x", stroke: "currentColor", strokeWidth: 1.5 }),
      Plot.text(named, {
        x: "x",
        frameAnchor: "top",
        text: "text",
        dy: -12,
        dx: 2,
        textAnchor: "start",
        fill: "currentColor",
      }),
      Plot.text([...out, ...marks], {
        x: (d) => (d.x1 + d.x2) / 2,
        frameAnchor: "bottom",
        text: "text",
        dy: -6,
        rotate: -90,
        textAnchor: "start",
        fill: "currentColor",
        stroke: "var(--paper)",
        strokeWidth: 4,
      }),
    ],
  });
  heat.scale = picture.scale("x");
  heat.line = document.createElementNS(picture.namespaceURI, "path");
  heat.line.setAttribute("d", `M0,30V${picture.getAttribute("height") - 30}`);
  heat.line.setAttribute("stroke", "currentColor");
  heat.line.setAttribute("stroke-dasharray", "1,3");
  picture.append(heat.line);
  moveHeatLine();
  const busy = heat.epoch !== epoch || !heat.done;
  const caption =
    (busy ? "Computing … " : "") +
    (all
      ? `All ${number(heat.found.length)} rows of the epoch`
      : `${number(heat.found.length)} of ${number(positions)} positions, evenly spread`) +
    `; a cell is ${count(perX, "step")} by ${count(perY, "sample")}. Its colour is the data rank that reads more than half of what is in it, grey if none does; the fuller, the stronger. Dots: the step.` +
    (begun.length ? " Lines: where a job begins; its data ranks are those of its own mesh." : "") +
    (isDealt ? " Grey, too: rows that are dealt by cost (balance=)." : "") +
    (padded
      ? ` The last step has padding.`
      : dropped
        ? ` ${count(positions - plan.epochOf(epoch).served, "sample")} at the end of the order are dropped.`
        : "");
  return {
    picture,
    caption,
    legend:
      ranksInOrder.length <= 10
        ? [...ranksInOrder.map((rank) => [`data rank ${rank}`, colour(rank)]), ["mixed", "var(--mixed)"]]
        : [],
    head: ["first step", "first sample", "rows in the cell", "data rank: rows"],
    rows: () =>
      [...cells.values()].sort((a, b) => a.x - b.x || a.y - b.y).map((cell) => [cell.x, cell.y, cell.total, cell.text]),
  };
}

function drawDrift(width) {
  const { epoch } = state;
  const { positions } = plan.epochOf(epoch);
  const first = plan.firstOfRun(epoch);
  const many = Math.min(positions, 240);
  const found = Array.from({ length: many + 1 }, (_, at) => {
    const position = at === many ? positions : positionOf(at, many, positions);
    return { position, ...plan.draws.drift(first + position) };
  });
  const fill = colours(order.sources);
  const lines = found.flatMap(({ position, drift }) =>
    drift.map((value, source) => ({ position, value, source: order.sources[source] })),
  );
  const picture = Plot.plot({
    width,
    height: 240,
    marginLeft: 56,
    x: { label: "position in the epoch", tickFormat: short, ticks: Math.max(3, Math.floor(width / 90)) },
    y: { label: "samples above (+) or below (−) the share", grid: true, labelArrow: "none" },
    color: { type: "identity" },
    marks: [
      Plot.areaY(found, {
        x: "position",
        y1: (d) => -d.bound,
        y2: "bound",
        fill: "var(--mixed)",
        fillOpacity: 0.15,
        curve: "step-before",
      }),
      Plot.lineY(found, {
        x: "position",
        y: "bound",
        stroke: "currentColor",
        strokeDasharray: "4,3",
        curve: "step-before",
      }),
      Plot.lineY(found, {
        x: "position",
        y: (d) => -d.bound,
        stroke: "currentColor",
        strokeDasharray: "4,3",
        curve: "step-before",
      }),
      Plot.ruleY([0]),
      Plot.lineY(lines, { x: "position", y: "value", z: "source", stroke: (d) => fill(d.source), strokeWidth: 1.25 }),
    ],
  });
  const worst = Math.max(...found.flatMap((one) => one.drift.map(Math.abs)));
  const caption =
    `How many samples of each source the run has drawn, less its share, at ${number(found.length)} positions: at most ${number(worst)} off. ` +
    `Dashed: the bound, ${number(found.at(-1).bound)} at the end, which holds at every position.`;
  return {
    picture,
    caption,
    legend: order.sources.map((name) => [name, fill(name)]),
    head: ["position", "bound", ...order.sources],
    rows: () =>
      found.map((one) => [one.position, +one.bound.toFixed(6), ...one.drift.map((value) => +value.toFixed(6))]),
  };
}

function drawLife(width) {
  const runs = [...new Set(view.stretches.map((one) => one.run))];
  const fill = colours(runs);
  const counted = view.stretches.filter((one) => one.counts !== false);
  const lost = view.stretches.filter((one) => one.counts === false);
  const low = lost.length ? 14 : 0; // pixels for them, below the others
  const sizeOf = (epoch) =>
    Math.max(plan.epochOf(epoch).positions, ...view.stretches.map((one) => (one.epoch === epoch ? one.end : 0)));
  const epochs = [...new Set(view.stretches.map((one) => one.epoch))].sort((a, b) => a - b);
  /** Positions of an epoch that were delivered, and those that were delivered again. */
  function coverage(epoch) {
    let [once, twice, upto] = [0, 0, 0];
    for (const { first, end } of counted
      .filter((one) => one.epoch === epoch)
      .sort((a, b) => a.first - b.first)) {
      once += Math.max(0, end - Math.max(first, upto));
      twice += Math.max(0, Math.min(end, upto) - first);
      upto = Math.max(upto, end);
    }
    return (
      (view.parts
        ? `epoch ${epoch}: ${count(once, "position")}`
        : `epoch ${epoch}: ${number(once)} of ${count(plan.epochOf(epoch).positions, "position")}`) +
      (twice ? `, ${number(twice)} twice` : "")
    );
  }
  const written = counted.filter(
    (one) => (one.end - one.first) / Math.max(...epochs.map(sizeOf)) > (6.5 * one.run.length) / (width - 82),
  );
  const picture = Plot.plot({
    width,
    height: 50 + (34 + low) * epochs.length,
    marginLeft: 62,
    x: {
      label: "position",
      domain: [0, Math.max(...epochs.map(sizeOf))],
      tickFormat: short,
      ticks: Math.max(3, Math.floor(width / 90)),
    },
    y: { type: "band", domain: epochs, label: "epoch", padding: 0.2 },
    color: { type: "identity" },
    marks: [
      Plot.barX(epochs, {
        y: (d) => d,
        x1: 0,
        x2: sizeOf,
        insetBottom: low,
        fill: "none",
        stroke: "var(--quiet)",
        strokeDasharray: "3,3",
      }),
      Plot.barX(counted, {
        y: "epoch",
        x1: "first",
        x2: "end",
        fill: (d) => fill(d.run),
        fillOpacity: 0.8,
        insetBottom: low,
        title: (d) => `${d.run}: epoch ${d.epoch}, positions ${d.first}–${d.end - 1}`,
      }),
      Plot.barX(lost, {
        y: "epoch",
        x1: "first",
        x2: "end",
        fill: "var(--mixed)",
        fillOpacity: 0.3,
        stroke: (d) => fill(d.run),
        strokeWidth: 1.5,
        insetTop: 28,
        title: (d) => `${d.run}: epoch ${d.epoch}, positions ${d.first}–${d.end - 1}, does not count`,
      }),
      Plot.text(written, {
        y: "epoch",
        x: (d) => (d.first + d.end) / 2,
        dy: -low / 2,
        text: "run",
        fill: (d) => onColour(fill(d.run)),
      }),
    ],
  });
  return {
    picture,
    caption: `What was delivered, by which job; ${epochs.map(coverage).join("; ")}.` +
      (view.parts ? "" : " Dashed: not delivered.") +
      (lost.length ? " Thin: delivered, but the run was resumed from before it, so it does not count." : ""),
    legend: runs.map((run) => [run, fill(run)]),
    head: ["epoch", "first position", "position after the last", "job", "counts"],
    rows: () =>
      [...counted, ...lost].map((one) => [one.epoch, one.first, one.end, one.run, one.counts === false ? "no" : "yes"]),
  };
}

/** Of a stream: who reads which part. */
function drawParts(width) {
  const jobs = new Map(view.stretches.map((one) => [one.run, view.meshes[one.mesh] ?? view.mesh]));
  const readers = [...jobs].map(([run, mesh]) => ({ run, mesh }));
  if (!readers.length) readers.push({ run: "the plan", mesh: view.mesh });
  const cells = readers.flatMap(({ run, mesh }) =>
    mesh.parts.flatMap((parts, rank) => parts.map((part) => ({ run, part, rank }))),
  );
  const left = Math.min(150, 16 + 6.5 * Math.max(...readers.map((one) => one.run.length)));
  const picture = Plot.plot({
    width,
    height: 50 + 30 * readers.length,
    marginLeft: left,
    x: { type: "band", label: "part", ticks: view.parts > width / 30 ? [] : undefined },
    y: { type: "band", label: null, tickSize: 0, domain: readers.map((one) => one.run), padding: 0.1 },
    color: { type: "identity" },
    marks: [
      Plot.cell(cells, {
        x: "part",
        y: "run",
        fill: (d) => colour(d.rank),
        title: (d) => `${d.run}: part ${d.part} is read by data rank ${d.rank}`,
      }),
      view.parts > width / 30
        ? null
        : Plot.text(cells, { x: "part", y: "run", text: "rank", fill: (d) => onColour(colour(d.rank)) }),
    ],
  });
  const files = view.files.length ? ` The files: ${view.files.slice(0, 8).join(", ")}${view.files[8] ? ", …" : ""}.` : "";
  return {
    picture,
    caption: `${count(view.parts, "part")}, each read as a whole by one data rank, whose number and colour it has.${files}`,
    head: ["job", "data rank", "global ranks", "parts"],
    rows: () =>
      readers.flatMap(({ run, mesh }) =>
        mesh.parts.map((parts, rank) => [run, rank, stretchesOf(mesh.byRank.get(rank)), stretchesOf(parts)]),
      ),
  };
}

// The page

const pictures = byId("pictures");
const pair = pictures.appendChild(Object.assign(document.createElement("div"), { className: "pair" }));
const updateMesh = figure("mesh", "The mesh, coloured by data rank", pair, drawMesh);
/** A picture that only data with an index has. */
const ofIndex = (...what) => (view.parts ? () => {} : figure(...what));
const updateStep = ofIndex("flow", "The samples of a step, on their way to the ranks", pair, drawStep);
const updateHeat = ofIndex("heat", "When each sample is read, and by which data rank", pictures, drawHeat);
const updateLoads = ofIndex("loads", "Padding and imbalance, step by step", pictures, drawLoads);
const updateParts = view.parts ? figure("parts", "Who reads which part of the stream", pair, drawParts) : () => {};
const updateDrift =
  order.kind === "mixture" ? figure("drift", "The mixture, beside its weights", pictures, drawDrift) : () => {};
const updateLife = view.stretches.length ? figure("life", "The life of the run", pictures, drawLife) : () => {};

function summary() {
  const { samples, steps } = plan.epochOf(state.epoch);
  const names = {
    sequential: "in order",
    shuffled: "shuffled",
    blocks: `shuffled in blocks of ${order.block_size}, ${order.window} at a time`,
    paddle: "in Paddle's order",
    mixture: "of a mixture",
  };
  byId("controls").hidden = Boolean(view.parts);
  if (view.parts) {
    byId("summary").textContent = `A stream in global batches of ${number(view.batchSize)}, tail '${view.tail}'.`;
    return;
  }
  byId("summary").textContent =
    `${count(samples, "sample")} ${names[order.kind]}, in global batches of ${number(view.batchSize)}: ${count(steps, "step")} an epoch; seed ${view.seed}, tail '${view.tail}'.`;
}

/** Sets the controls and draws what depends on them. */
function show(epoch, step) {
  const changed = epoch !== state.epoch || heat.epoch === null;
  state.epoch = Math.max(0, Math.floor(epoch) || 0);
  state.step = Math.min(last(state.epoch), Math.max(0, Math.floor(step) || 0));
  byId("epochSlider").max = Math.max(31, state.epoch, ...view.stretches.map((one) => one.epoch));
  byId("stepSlider").max = byId("step").max = last(state.epoch);
  for (const name of ["epoch", "step"]) byId(name).value = byId(`${name}Slider`).value = state[name];
  summary();
  updateMesh();
  updateStep();
  updateLoads();
  if (changed) {
    updateDrift();
    if (!view.parts) computeHeat(updateHeat);
    updateHeat();
  } else if (!view.parts) moveHeatLine();
  const hash = new URLSearchParams(location.hash.slice(1));
  hash.set("epoch", state.epoch);
  hash.set("step", state.step);
  if (location.protocol !== "about:") history.replaceState(null, "", `#${hash}`); // a notebook's frame has no address
}

let due = null; // one drawing a frame, however fast the slider moves
function soon() {
  const wanted = [
    this.id.startsWith("epoch") ? +this.value : state.epoch,
    this.id.startsWith("step") ? +this.value : state.step,
  ];
  cancelAnimationFrame(due);
  due = requestAnimationFrame(() => show(...wanted));
}
for (const name of ["epoch", "step"]) {
  byId(`${name}Slider`).addEventListener("input", soon);
  byId(name).addEventListener("change", soon);
}
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("theme").addEventListener("change", (event) => (document.documentElement.dataset.theme = event.target.value));

function fromHash() {
  const hash = new URLSearchParams(location.hash.slice(1));
  if (hash.has("theme")) document.documentElement.dataset.theme = byId("theme").value = hash.get("theme");
  show(+(hash.get("epoch") ?? view.at[0]), +(hash.get("step") ?? view.at[1]));
}
addEventListener("hashchange", fromHash);
fromHash();
updateParts();
updateLife();
if (view.parts) document.body.dataset.busy = "no";
let widthBefore = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === widthBefore) return; // a phone hides its bars
  widthBefore = innerWidth;
  for (const update of [updateMesh, updateStep, updateHeat, updateLoads, updateDrift, updateParts, updateLife]) update();
});
