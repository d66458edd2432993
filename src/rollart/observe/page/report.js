"use strict";
// Data of the run is inserted as text only (`textContent`, attributes), never as markup.
(() => {
  const D = JSON.parse(document.getElementById("data").textContent);
  const R = D.report;
  const byId = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";

  function fill(node, attributes, children) {
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (key === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
      else if (key === "style") for (const [name, entry] of Object.entries(value)) node.style.setProperty(name, entry);
      else node.setAttribute(key, value === true ? "" : value);
    }
    for (const child of children.flat(3)) if (child !== null && child !== undefined) node.append(child);
    return node;
  }
  const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const g = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  // --- words and numbers -----------------------------------------------------------------------------------------

  const words = (cause) => cause.replaceAll("_", " ");
  const count = (value) => Math.round(value).toLocaleString("en");
  const plural = (value, one, many) => `${count(value)} ${value === 1 ? one : many || one + "s"}`;
  const share = (value) => (value === 0 ? "0 %" : value < 0.001 ? "< 0.1 %" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`);
  function seconds(value) {
    if (value === null || value === undefined) return "–";
    if (value === 0) return "0 s";
    if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
    if (value < 100) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
    const all = Math.round(value), hours = Math.floor(all / 3600), minutes = Math.floor(all / 60) % 60;
    return hours ? `${hours} h ${minutes} min` : `${minutes} min ${all % 60} s`;
  }
  function number(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1000) return count(value);
    if (size !== 0 && size < 0.001) return value.toExponential(1);
    return String(Number(value.toPrecision(3)));
  }
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const colours = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"].map((name) => `var(${name})`);
  const dashes = ["", "6 3", "2 3", "8 3 2 3", "1 4", "10 4"];

  // --- tooltip ----------------------------------------------------------------------------------------------------

  const tip = byId("tip");
  function showTip(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 12) : y + 18}px`;
  }
  const hideTip = () => { tip.hidden = true; };
  addEventListener("scroll", hideTip, { passive: true });
  addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
  /** Show `text(event)` while the pointer is over the node, or after a tap. */
  function withTip(node, text) {
    const show = (event) => { const content = text(event); content ? showTip(content, event.clientX, event.clientY) : hideTip(); };
    node.addEventListener("pointermove", show);
    node.addEventListener("pointerdown", show);
    node.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hideTip());
    return node;
  }

  // --- charts ----------------------------------------------------------------------------------------------------

  /** Draw now and whenever the width changes. */
  function drawn(node, draw) {
    let last = 0;
    const again = () => {
      const width = Math.floor(node.clientWidth);
      if (width && width !== last) { last = width; node.replaceChildren(...[draw(width)].flat()); }
    };
    new ResizeObserver(again).observe(node);
    again();
    return node;
  }

  function ticks(low, high, most) {
    const span = high - low || 1;
    const rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((size) => size >= rough);
    const out = [];
    for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) out.push(Math.abs(value) < step / 2 ? 0 : value);
    return out;
  }
  /** Label of a tick, with just enough decimals to distinguish it from its neighbours. */
  function tickText(value, all) {
    const step = all.length > 1 ? Math.abs(all[1] - all[0]) : Math.abs(value) || 1;
    const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return value === 0 ? "0" : places > 4 ? value.toExponential(1) : places ? value.toFixed(places) : count(value);
  }

  const path = (points, x, y) => points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("");

  /** `lines` [{name, points, colour, dash, rings}], `levels` [{name, value}]. */
  function lineChart({ title, unit, lines, levels = [], low, high, height = 190 }) {
    const all = lines.flatMap((line) => [...line.points, ...(line.rings || [])]);
    const ys = [...all.map((p) => p[1]), ...levels.map((level) => level.value)].filter(Number.isFinite);
    const xs = all.map((p) => p[0]);
    const [x0, x1] = [Math.min(0, ...xs), Math.max(1, ...xs)];
    let y0 = low === undefined ? Math.min(...ys) : Math.min(low, ...ys);
    let y1 = high === undefined ? Math.max(...ys) : Math.max(high, ...ys);
    if (y0 === y1) { y0 -= Math.abs(y0) / 2 || 0.5; y1 += Math.abs(y1) / 2 || 0.5; }
    const holder = h("div");
    const block = h("div", {}, h("p", { class: "title" }, title, " ", h("small", {}, unit)), holder);
    drawn(holder, (width) => {
      const yTicks = ticks(y0, y1, 4), label = (value) => tickText(value, yTicks);
      const left = 10 + 7 * Math.max(...yTicks.map((value) => label(value).length)), right = 12, top = 8, bottom = 34;
      const x = (value) => left + ((value - x0) / (x1 - x0)) * (width - left - right);
      const y = (value) => top + (1 - (value - y0) / (y1 - y0)) * (height - top - bottom);
      const svg = g("svg", { width, height, role: "img", "aria-label": `${title}, ${unit}, by step` });
      for (const value of yTicks) {
        svg.append(g("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
        svg.append(g("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, label(value)));
      }
      for (const value of ticks(x0, x1, width / 80).filter(Number.isInteger))
        svg.append(g("text", { x: x(value), y: height - bottom + 15, "text-anchor": "middle" }, count(value)));
      svg.append(g("text", { x: width - right, y: height - 3, "text-anchor": "end" }, "step"));
      let free = Infinity; // upper limit for the next label; the lowest level comes first
      for (const level of [...levels].sort((a, b) => a.value - b.value)) {
        const at = y(level.value);
        svg.append(g("line", { x1: left, x2: width - right, y1: at, y2: at, stroke: "var(--muted)", "stroke-dasharray": "2 4" }));
        const text = at < top + 14 ? at + 13 : at - 4;
        if (text <= free) { svg.append(g("text", { x: left + 4, y: text }, level.name)); free = text - 14; }
      }
      for (const line of lines) {
        svg.append(g("path", { d: path(line.points, x, y), fill: "none", stroke: line.colour, "stroke-width": line.smooth ? 1 : 2, "stroke-opacity": line.smooth ? 0.4 : 1, "stroke-dasharray": line.dash || null, "stroke-linejoin": "round" }));
        if (line.smooth) svg.append(g("path", { d: path(line.smooth, x, y), fill: "none", stroke: line.colour, "stroke-width": 2.2, "stroke-linejoin": "round" }));
        for (const [a, b] of line.rings || [])
          svg.append(g("circle", { cx: x(a), cy: y(b), r: 5, fill: "var(--ground)", stroke: line.colour, "stroke-width": 2.5 }));
        if (line.points.length === 1) svg.append(g("circle", { cx: x(line.points[0][0]), cy: y(line.points[0][1]), r: 3, fill: line.colour }));
      }
      return withTip(svg, (event) => {
        const step = Math.round(x0 + ((event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right)) * (x1 - x0));
        const near = (points) => points.reduce((best, p) => (!best || Math.abs(p[0] - step) < Math.abs(best[0] - step) ? p : best), null);
        const parts = lines.map((line) => [line.name, near(line.points)]).filter(([, p]) => p);
        const rings = lines.map((line) => near(line.rings || [])).filter((p) => p && Math.abs(p[0] - step) <= (x1 - x0) / 40);
        if (!parts.length && !rings.length) return "";
        return [...parts.map(([name, p]) => `${name}, step ${p[0]}: ${number(p[1])}`), ...rings.map((p) => `held-out, step ${p[0]}: ${number(p[1])}`)].join("\n");
      });
    });
    return block;
  }

  /** Moving average, to make the trend visible. */
  function smoothed(points) {
    const reach = Math.floor(points.length / 20);
    if (reach < 1) return null;
    return points.map(([x], i) => { const part = points.slice(Math.max(0, i - reach), i + reach + 1); return [x, sum(part.map((p) => p[1])) / part.length]; });
  }

  function bars(node, title, unit, entries, text = count) {
    node.replaceChildren(h("p", { class: "title" }, title, " ", h("small", {}, unit)));
    if (!entries.length) return node.append(h("p", { class: "muted" }, "none"));
    const total = sum(entries.map((entry) => entry.value)), most = Math.max(...entries.map((entry) => entry.value));
    const grid = h("div", { class: "hbar" });
    for (const { name, value, colour } of entries)
      grid.append(
        h("span", {}, name),
        h("div", { class: "track" }, h("div", { style: { width: `${(100 * value) / (most || 1)}%`, background: colour || "var(--accent)" } })),
        h("span", { class: "muted" }, `${text(value)} · ${share(total ? value / total : 0)}`),
      );
    return node.append(grid);
  }

  function table(node, columns, rows) {
    node.replaceChildren(
      h("thead", {}, h("tr", {}, columns.map(([name, kind]) => h("th", { class: kind }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: columns[i][1] }, cell))))),
    );
  }

  // --- summary ---------------------------------------------------------------------------------------------------

  const tasks = [...new Set([...D.evaluations.map((e) => e.task), ...D.steps.flatMap((s) => Object.keys(s.rewards))])].sort();
  const heldOut = (task) => D.evaluations.filter((e) => e.task === task && e.mean_reward !== null);
  const scriptsOf = (task) => Object.entries(D.baselines[task] || {});

  function taskCard(task) {
    const rounds = heldOut(task), scripts = scriptsOf(task);
    const rewards = D.steps.filter((s) => task in s.rewards).map((s) => s.rewards[task]);
    const values = rounds.length ? rounds.map((e) => e.mean_reward) : rewards;
    // Tasks with scripted baselines are scored by success rate; elsewhere a reward is any number.
    const format = scripts.length ? share : number;
    const measure = !rounds.length ? "reward at the first and last step" : scripts.length ? "held-out success" : "held-out reward";
    const card = h("div", { class: "card" }, h("p", { class: "what" }, h("b", {}, task), h("span", {}, measure)));
    if (!values.length) { card.append(h("p", { class: "muted" }, "no measurements")); return card; }
    const first = values[0], last = values[values.length - 1];
    card.append(h("p", { class: "result" }, h("span", { class: "from" }, `${format(first)} → `), values.length > 1 ? format(last) : "…"));
    const high = Math.max(1, ...values, ...scripts.map((s) => s[1])), low = Math.min(0, ...values);
    const holder = h("div");
    card.append(holder);
    drawn(holder, (width) => {
      const x = (value) => 7 + ((value - low) / (high - low)) * (width - 14);
      const svg = g("svg", { width, height: 30, role: "img", "aria-label": `${task}: from ${format(first)} to ${format(last)}` });
      svg.append(g("line", { x1: x(low), x2: x(high), y1: 14, y2: 14, stroke: "var(--line)", "stroke-width": 6, "stroke-linecap": "round" }));
      svg.append(g("line", { x1: x(first), x2: x(last), y1: 14, y2: 14, stroke: last >= first ? "var(--accent)" : "var(--bad)", "stroke-width": 6 }));
      for (const [, value] of scripts) svg.append(g("line", { x1: x(value), x2: x(value), y1: 4, y2: 24, stroke: "var(--muted)", "stroke-width": 1.5 }));
      svg.append(g("circle", { cx: x(first), cy: 14, r: 5.5, fill: "var(--ground)", stroke: "var(--muted)", "stroke-width": 2 }));
      if (values.length > 1) svg.append(g("circle", { cx: x(last), cy: 14, r: 6.5, fill: last >= first ? "var(--accent)" : "var(--bad)" }));
      return svg;
    });
    if (scripts.length) card.append(h("p", { class: "scripts" }, "Scripted baselines: ", scripts.map(([name, value]) => `${name} ${share(value)}`).join(", ")));
    else if (rounds.length) card.append(h("p", { class: "scripts" }, `${plural(rounds[rounds.length - 1].episodes, "episode")} per evaluation`));
    return card;
  }

  function summary() {
    document.title = `${D.name}: rollart report`;
    byId("name").textContent = D.name;
    const ended = R.stop === "done" ? "done" : R.stop ? "stopped" : "not ended";
    byId("about").textContent = `${R.mode || "unknown mode"} · α = ${R.alpha} · seed ${R.seed} · ${plural(R.steps, "step")} · ${ended} · folder ${D.folder}`;
    byId("tasks").append(...tasks.map(taskCard));
    const worst = Math.max(0, ...Object.keys(R.staleness).map(Number));
    const audit = D.audit.violations ? h("span", { class: "bad" }, plural(D.audit.violations, "violation")) : h("span", { class: "good" }, "✓ all rules hold");
    const coldStart = D.config && D.config.model && D.config.model.cold_start;
    const waste = Object.entries(R.wasted_tokens).sort((a, b) => b[1] - a[1])[0];
    const figures = [
      ["wall time", seconds(R.seconds), coldStart ? "excluding the cold start" : `first step after ${seconds(R.first_step_s)}`],
      ["step", seconds(R.step_s), "mean, excluding the first"],
      ["trained", `${number(R.trajectories_per_s)} traj/s`, `${count(R.tokens_per_s)} tokens/s`],
      ["staleness", `≤ ${worst}`, `bound α = ${R.alpha}`],
      ["tokens wasted", share(D.wasted_token_share), waste ? `of ${count(R.sampled_tokens)}, mostly ${words(waste[0])}` : `of ${count(R.sampled_tokens)} sampled`],
      ["audit", audit, `${count(D.audit.events)} events checked`],
    ];
    byId("figures").append(...figures.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, more)))));
    byId("attention").append(...attention().map((item) => h("li", {}, item)));
    if (!byId("attention").children.length) byId("attention").append(h("li", { class: "calm" }, "No failures, no lost workers, no stalls."));
  }

  function attention() {
    const out = [];
    const link = (text, id) => h("a", { href: `#${id}` }, text);
    if (!R.stop) out.push(`The run did not finish: its journal ends after ${seconds(R.seconds)}, with ${plural(R.open_trajectories, "trajectory", "trajectories")} open.`);
    else if (R.stop !== "done") out.push(`The run stopped: ${R.ended}`);
    if (!D.complete) out.push("The journal has gaps, so totals are not available.");
    if (D.audit.pruned) out.push(`The first ${count(D.audit.pruned)} events were pruned: the timeline and environments start after them; totals and curves cover the whole run.`);
    for (const violation of D.audit.listed.slice(0, 5)) out.push(`Audit: ${violation}`);
    const hung = D.failures.filter((f) => f.hung).sort((a, b) => b.at - b.since - (a.at - a.since));
    if (hung.length) {
      const worst = hung[0];
      out.push([`${plural(hung.length, "hang")}${D.failed > D.failures.length ? " or more" : ""}; the longest: ${worst.part}, ${worst.what}, ${seconds(worst.at - worst.since)}; ${worst.done}. `, link("See all", "environments"), " · ", link("timeline", "timeline")]);
    }
    const other = D.failed - hung.length;
    if (other) out.push([`${plural(other, "trajectory", "trajectories")} failed${hung.length ? " for other reasons" : ""}. `, link("See why", "environments")]);
    if (R.workers_lost) out.push([`${plural(R.workers_lost, "worker")} lost. `, link("See when", "timeline")]);
    if (R.stalls) out.push([`The run stalled ${plural(R.stalls, "time")}. `, link("See when", "timeline")]);
    if (R.redistributed) out.push(`${plural(R.redistributed, "batch", "batches")} had the share of one task filled by others.`);
    return out;
  }

  // --- learning --------------------------------------------------------------------------------------------------

  function learning() {
    const node = byId("curves");
    for (const [index, task] of tasks.entries()) {
      const points = D.steps.filter((s) => task in s.rewards).map((s) => [s.step, s.rewards[task]]);
      const rings = heldOut(task).map((e) => [e.step, e.mean_reward]);
      if (!points.length && !rings.length) continue;
      const best = scriptsOf(task).slice(-2).map(([name, value]) => ({ name: `script: ${name}`, value }));
      const named = [...new Set(D.steps.flatMap((s) => Object.keys(s.reward_parts)))].filter((name) => name.startsWith(`${task}/`)).sort();
      node.append(lineChart({ title: task, unit: "mean reward", low: 0, high: best.length ? 1 : undefined, levels: best, lines: [{ name: "training", points, smooth: smoothed(points), rings, colour: colours[index % 6] }] }));
      if (named.length) {
        const lines = named.map((name, number) => {
          const values = D.steps.filter((s) => name in s.reward_parts).map((s) => [s.step, s.reward_parts[name]]);
          return { name: name.slice(task.length + 1), points: values, smooth: smoothed(values), rings: [], colour: colours[number % 6] };
        });
        node.append(lineChart({ title: `${task}, by reward`, unit: "mean", levels: [], lines }));
      }
    }
    if (!node.children.length) node.append(h("p", { class: "muted" }, "No training step or evaluation yet."));
  }

  function training() {
    const wanted = ["loss", "grad_norm", "mismatch", "ratio_mean", "entropy", "learning_rate", "value_loss", "clipped_high", "tokens"];
    const node = byId("metrics");
    for (const name of wanted) {
      const points = D.steps.map((s) => [s.step, s.metrics[name]]).filter((p) => Number.isFinite(p[1]));
      if (points.length > 1 && node.children.length < 6) node.append(lineChart({ title: words(name), unit: "by step", height: 150, lines: [{ name: words(name), points, colour: "var(--accent)" }] }));
    }
    const times = D.steps.map((s) => [s.step, s.train_s]);
    if (times.length > 1) node.append(lineChart({ title: "training time", unit: "seconds", height: 150, low: 0, lines: [{ name: "seconds", points: times, colour: "var(--accent)" }] }));
    if (!node.children.length) byId("training").hidden = true;
  }

  // --- timeline --------------------------------------------------------------------------------------------------

  const KINDS = {
    training: ["var(--c1)", "training"], publication: ["var(--c5)", "publication"], checkpoint: ["var(--c3)", "checkpoint"],
    waiting: ["var(--c6)", "waiting for weights"], suspended: ["var(--c4)", "engines suspended"], "held-out": ["var(--muted)", "held-out round"],
    starting: ["var(--none)", "starting"], hung: ["var(--bad)", "hung"], failed: ["var(--bad)", "failed"],
  };
  const ROW = 20, LEVELS = 10;

  function strip(row, x) {
    const out = [], bin = D.timeline.bin_s, width = (from, to) => Math.max(0.4, x(to * bin) - x(from * bin));
    // Scale to the 95th percentile, so that a single peak does not make the rest pale.
    const sorted = row.values.filter((v) => v > 0).sort((a, b) => a - b);
    const top = sorted.length ? sorted[Math.floor(0.95 * (sorted.length - 1))] : 1;
    const level = (value) => (value > 0 ? Math.max(1, Math.ceil(LEVELS * Math.min(1, value / top))) : 0);
    for (let from = 0; from < row.values.length; ) {
      const now = level(row.values[from]);
      let to = from + 1;
      while (to < row.values.length && level(row.values[to]) === now) to += 1;
      if (now) out.push(g("rect", { x: x(from * bin), width: width(from, to), y: 0, height: ROW, fill: `rgb(var(--rgb-accent) / ${0.1 + (0.9 * now) / LEVELS})` }));
      from = to;
    }
    return out;
  }

  function rowText(row, at, reach) {
    const lines = [`${row.name} at ${seconds(at)}`];
    if (row.values.length) lines.push(`${number(row.values[Math.min(row.values.length - 1, Math.floor(at / D.timeline.bin_s))] || 0)} ${row.unit} (peak ${number(row.peak)})`);
    const spans = row.spans.filter(([start, end]) => at >= start - reach && at <= end + reach);
    for (const [start, end, kind, note] of spans.slice(0, 4)) lines.push(kind === "hung" || kind === "failed" ? note : `${kind} ${note}: ${seconds(end - start)}`);
    for (const [when, kind, note] of row.marks) if (Math.abs(when - at) <= reach && lines.length < 9) lines.push(`${kind}: ${note}`);
    return lines.join("\n");
  }

  function timeline() {
    const T = D.timeline, holder = byId("rows");
    const used = new Set(T.rows.flatMap((row) => row.spans.map((span) => span[2])));
    byId("kinds").append(
      h("span", {}, h("i", { style: { background: "var(--accent)" } }), "working, training"),
      ...Object.entries(KINDS).filter(([kind]) => used.has(kind) && kind !== "training").map(([, [colour, name]]) => h("span", {}, h("i", { style: { background: colour } }), name)),
    );
    if (!(T.seconds > 0)) return holder.append(h("p", { class: "note" }, "No events yet."));
    const inner = h("div", { class: "inner" });
    holder.append(inner);
    let zoom = 1;
    const draw = () => {
      const width = Math.floor((holder.clientWidth - 2) * zoom) - 24;
      if (width < 50) return;
      const x = (at) => (at / T.seconds) * width;
      inner.style.width = `${width + 24}px`;
      inner.replaceChildren(...T.rows.flatMap((row) => {
        const svg = g("svg", { class: "strip", width, height: ROW, "data-row": row.name, role: "img", "aria-label": row.name });
        svg.append(...strip(row, x));
        const bad = [];
        for (const [start, end, kind] of row.spans) {
          const isBad = kind === "hung" || kind === "failed";
          const rect = g("rect", { x: x(start), width: Math.max(isBad ? 3 : 0.7, x(end) - x(start)), y: kind === "starting" ? 7 : 0, height: isBad ? 8 : kind === "starting" ? 6 : ROW, fill: KINDS[kind][0], class: `span-${kind}`, stroke: isBad ? "var(--ground)" : null, "stroke-width": isBad ? 1 : null });
          if (isBad) bad.push(rect); // on top of the rest
          else svg.append(rect);
        }
        svg.append(...bad);
        for (const [at] of row.marks) svg.append(g("path", { d: `M${x(at) - 5},0h10l-5,9z`, fill: "var(--bad)", stroke: "var(--ground)" }));
        for (const at of T.resumed) svg.append(g("line", { x1: x(at), x2: x(at), y1: -18, y2: ROW, stroke: "var(--ink)", "stroke-dasharray": "3 2" }));
        const failures = row.spans.filter((span) => span[2] === "hung" || span[2] === "failed");
        const hung = failures.filter((span) => span[2] === "hung").length;
        const failed = failures.length ? h("b", { class: "bad" }, `  ${[hung && `${hung} hung`, failures.length - hung && `${failures.length - hung} failed`].filter(Boolean).join(", ")}`) : null;
        const marked = row.marks.length ? h("b", { class: "bad" }, `  ${[...new Set(row.marks.map((mark) => mark[1]))].join(", ")}`) : null;
        withTip(svg, (event) => { const at = ((event.clientX - svg.getBoundingClientRect().left) / width) * T.seconds; return at < 0 || at > T.seconds ? "" : rowText(row, at, (4 / width) * T.seconds); });
        return [h("p", { class: "name" }, row.name, " ", h("span", { class: "muted" }, row.unit ? `${row.unit}, peak ${number(row.peak)}` : ""), failed, marked), svg];
      }));
      const axis = g("svg", { width, height: 26 });
      for (const at of ticks(0, T.seconds, width / 90)) {
        axis.append(g("line", { class: "grid", x1: x(at), x2: x(at), y1: 2, y2: 8 }));
        axis.append(g("text", { x: x(at), y: 21, "text-anchor": at === 0 ? "start" : x(at) > width - 30 ? "end" : "middle" }, seconds(at).replace(/\.0+ s$/, " s")));
      }
      inner.append(axis);
    };
    const buttons = [1, 4, 16].map((times) => h("button", { type: "button", "aria-pressed": String(times === 1), on: { click: (event) => {
      const middle = (holder.scrollLeft + holder.clientWidth / 2) / holder.scrollWidth;
      zoom = times;
      for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.target));
      draw();
      holder.scrollLeft = middle * holder.scrollWidth - holder.clientWidth / 2;
    } } }, times === 1 ? "whole run" : `${times} ×`));
    byId("zoom").append(...buttons);
    let last = 0;
    new ResizeObserver(() => { if (holder.clientWidth !== last) { last = holder.clientWidth; draw(); } }).observe(holder);
    draw();
  }

  // --- time and tokens -------------------------------------------------------------------------------------------

  const CAUSES = {
    busy: ["var(--accent)", "busy"],
    weight_sync: ["var(--c4)", "weights are being updated"],
    barrier: ["color-mix(in srgb, var(--c2) 50%, var(--ground))", "the turns of a batch run in lockstep"],
    environment: ["var(--c2)", "all environments are working, none waits for a turn"],
    tail: ["var(--c5)", "no trajectory may start before the last ones of the batch finish"],
    reward: ["var(--c6)", "episodes have ended, their rewards are pending"],
    training: ["var(--c3)", "the next batch is complete; rollout may not run further ahead of training"],
    rollout: ["var(--c2)", "the next batch is not complete yet"],
    generation: ["var(--c6)", "agents wait for generation"],
    admission: ["var(--c5)", "admission allows no more episodes"],
    no_work: ["var(--none)", "nothing to do, for example at the start and the end"],
  };
  const causeOf = (cause) => CAUSES[cause] || ["var(--none)", words(cause)];

  function idle() {
    const pools = Object.entries(R.pools);
    if (!pools.length) return byId("pools").append(h("p", { class: "muted" }, "No training step yet, so no time was accounted for."));
    const seen = new Set();
    for (const [pool, times] of pools) {
      const total = sum(Object.values(times)) || 1;
      const order = Object.entries(times).sort((a, b) => (b[0] === "busy") - (a[0] === "busy") || b[1] - a[1]);
      const engines = R.engines[pool];
      const stack = h("div", { class: "stack" }, order.map(([cause, time]) => {
        seen.add(cause);
        return withTip(h("div", { style: { width: `${(100 * time) / total}%`, background: causeOf(cause)[0] } }), () => `${pool}: ${words(cause)} ${share(time / total)}\n${causeOf(cause)[1]}`);
      }));
      byId("pools").append(h("div", { class: "pool" }, h("div", { class: "label" }, h("span", {}, pool, " ", h("span", { class: "muted" }, engines ? plural(engines, "engine") : "")), h("span", { class: "muted" }, `${share((times.busy || 0) / total)} busy`)), stack));
    }
    const causes = Object.keys(CAUSES).filter((cause) => seen.has(cause));
    byId("causes").append(...causes.map((cause) => h("span", {}, h("i", { style: { background: causeOf(cause)[0] } }), cause === "busy" ? "busy" : `${words(cause)}: ${causeOf(cause)[1]}`)));
    table(byId("pool-table"), [["pool"], ...causes.map((cause) => [words(cause), "number"])], pools.map(([pool, times]) => { const total = sum(Object.values(times)) || 1; return [pool, ...causes.map((cause) => (times[cause] ? share(times[cause] / total) : "–"))]; }));
  }

  /** Why each task is on its hardware class, where that was measured, and when it was decided. */
  function affinity() {
    const why = Object.values(R.affinity);
    byId("affinity").hidden = !why.length;
    byId("affinity-note").textContent = `Tasks that found their hardware class by measured cost. ${R.moves ? `${plural(R.moves, "move")} after the first assignment.` : "No task moved after its first assignment."}`;
    byId("affinity-why").append(...why.map((sentence) => h("li", {}, sentence)));
    if (R.moves) table(byId("affinity-decisions"), [["at", "number"], ["cause"], ["decision", "wide"]], R.decisions.map((d) => [seconds(d.at), d.cause, d.why.join("; ")]));
  }

  function staleness() {
    const worst = Math.max(0, ...Object.keys(R.staleness).map(Number));
    byId("staleness-note").textContent = `Age of each group in weight updates, when its batch was claimed and when it was trained. Good: at most α = ${R.alpha} at the claim; the maximum here was ${worst}. Training in parallel with rollout adds one to the lag. On average, a sync suspended the engines for ${seconds(R.suspended_s)} and waited ${seconds(R.exposed_s)} for new weights.`;
    const entries = (counts) => Object.entries(counts).map(([value, groups]) => ({ name: plural(Number(value), "step"), value: groups, colour: Number(value) > R.alpha + 1 ? "var(--bad)" : null }));
    bars(byId("stale-bars"), "Staleness at the claim", "groups", entries(R.staleness));
    bars(byId("lag-bars"), "Lag behind the weights being trained", "groups", entries(R.lag));
    const points = D.steps.map((s) => [s.step, s.suspended_s * 1000]);
    if (points.length > 1) byId("sync-chart").append(lineChart({ title: "Engines suspended by a sync", unit: "milliseconds", low: 0, height: 150, lines: [{ name: "ms", points, colour: "var(--accent)" }] }));
  }

  function outcomes() {
    const good = new Set(["completed", "truncated", "trained", "evaluated"]);
    const entries = (counts) => Object.entries(counts).sort((a, b) => b[1] - a[1]).map(([name, value]) => ({ name: words(name), value, colour: name.endsWith("failed") ? "var(--bad)" : good.has(name) ? null : "var(--none)" }));
    bars(byId("outcome-bars"), "Trajectories", "by outcome", entries(R.outcomes));
    bars(byId("group-bars"), "Groups", "by outcome", entries(R.group_outcomes));
    const tokens = [{ name: "trained", value: R.trained_tokens }, { name: "held-out", value: R.evaluation_tokens, colour: "var(--c3)" }, ...Object.entries(R.wasted_tokens).sort((a, b) => b[1] - a[1]).map(([cause, value]) => ({ name: `wasted: ${words(cause)}`, value, colour: cause.endsWith("failed") ? "var(--bad)" : "var(--none)" }))];
    bars(byId("token-bars"), "Sampled tokens", "by use", tokens.filter((entry) => entry.value));
    for (const [cause, groups] of Object.entries(R.filtered)) byId("group-bars").append(h("p", { class: "muted" }, `filtered: ${cause} (${count(groups)})`));
  }

  /** Offered against trained, per task; extra members, with what they cost and bring. */
  function bias() {
    const table = byId("bias"), tasks = Object.keys(R.bias), names = { duration_s: "seconds", turns: "turns", tokens: "tokens", reward: "reward" };
    const cell = (c) => (c ? `${c.trained.toPrecision(3)} of ${c.offered.toPrecision(3)} (${c.distance.toFixed(2)})` : "–");
    if (!tasks.length) { table.append(h("caption", {}, "Nothing was trained yet.")); return; }
    table.append(h("thead", {}, h("tr", {}, h("th", {}, "task"), h("th", {}, "per"), ...Object.values(names).map((name) => h("th", {}, name)))));
    const body = h("tbody", {});
    for (const task of tasks) for (const [per, found] of [["prompt", R.bias[task]], ["member", R.member_bias[task] || {}]])
      body.append(h("tr", {}, h("td", {}, per === "prompt" ? task : ""), h("td", {}, per), ...Object.keys(names).map((q) => h("td", {}, cell(found[q])))));
    table.append(body);
    for (const warning of D.bias_warnings) byId("bias-warnings").append(h("p", { class: "bad" }, warning));
    const extra = Object.entries(R.redundancy).map(([task, r]) => `${task}: ${count(r.started)} extra members, ${count(r.trained)} of them trained, ${count(r.redundant_tokens)} tokens of stopped ones; groups were ready ${r.saved_s.toFixed(1)} s earlier, in sum.`);
    byId("redundancy").textContent = extra.join(" ");
  }

  /** Group failures of one kind that ended within a second of each other; hangs first, then by duration. */
  function together(failures) {
    const groups = [];
    for (const f of [...failures].sort((a, b) => a.at - b.at)) {
      const alike = groups.find(([g]) => g.hung === f.hung && g.what === f.what && g.outcome === f.outcome && g.task === f.task && f.at - g.at < 1);
      if (alike) alike.push(f);
      else groups.push([f]);
    }
    const lasted = (f) => f.at - f.since;
    for (const group of groups) group.sort((a, b) => lasted(b) - lasted(a));
    return groups.sort((a, b) => b[0].hung - a[0].hung || lasted(b[0]) - lasted(a[0]));
  }

  /** Calls of reward functions, and what they took. */
  function functions() {
    const rows = Object.entries(D.functions);
    byId("functions-part").hidden = !rows.length;
    const or = (value) => (value ? count(value) : "–");
    table(byId("functions"), [["task and reward"], ["calls", "number"], ["failed", "number"], ["median", "number"], ["95 %", "number"], ["99 %", "number"], ["retries", "number"], ["hedges", "number"], ["killed", "number"], ["computed here", "number"], ["cold starts", "number"], ["MB sent", "number"], ["replica time", "number"], ["cost", "number"]], rows.map(([name, f]) => [
      h("code", {}, name), count(f.calls), f.failed ? h("b", { class: "bad" }, count(f.failed)) : "–", seconds(f.p50_s || 0), seconds(f.p95_s || 0), seconds(f.p99_s || 0), or(f.retries), or(f.hedges), or(f.kills), or(f.fallbacks), or(f.cold_starts), f.bytes_out ? (f.bytes_out / 1e6).toFixed(1) : "–", seconds(f.replica_s || 0), f.cost ? f.cost.toPrecision(3) : "–",
    ]));
  }

  function environments() {
    byId("environments-note").textContent = D.failed ? "A failure is never a reward of 0: the trajectory is dropped and replaced by another one. Good: few failures, spread over slots. If many slots fail at once, their worker or its machine hung." : "Good: no failures, and no slot far slower than the others.";
    if (D.failures.length) {
      const rows = together(D.failures).slice(0, 25);
      table(byId("failures"), [["what"], ["part"], ["from", "number"], ["action", "wide"], ["cause", "wide"], ["task"]], rows.map((all) => {
        const f = all[0], lasted = seconds(f.at - f.since);
        return [
          h("b", { class: "bad" }, all.length > 1 ? `${count(all.length)} × ` : "", f.hung ? `hung ${lasted} in a ${f.what}` : `${words(f.outcome)} after ${lasted}`),
          [h("code", {}, f.part), all.length > 1 ? h("div", { class: "muted" }, `and ${count(all.length - 1)} more at the same time`) : null],
          seconds(f.since), f.done, f.cause, f.task,
        ];
      }));
      const listed = sum(rows.map((all) => all.length));
      if (listed < D.failed) byId("environments-note").append(` ${count(listed)} of ${count(D.failed)} are listed.`);
    } else byId("failures").replaceChildren(h("tbody", {}, h("tr", {}, h("td", { class: "good" }, "None."))));
    functions();
    byId("slots-note").textContent = `Slots with the longest waits, out of ${plural(D.slot_count, "slot")}. The journal records the time of a reset, but that of a step only together with the following turn, so compare slots with each other.` + (D.step_s === null ? "" : ` On average a reset or step took ${seconds(D.step_s)}.`);
    const mean = (total, number) => (number ? seconds(total / number) : "–");
    table(byId("slots"), [["longest wait", "number"], ["slot"], ["task"], ["operation"], ["until", "number"], ["episodes", "number"], ["mean reset", "number"], ["mean step and turn", "number"], ["failures", "number"]], D.slots.map((s) => [
      h("b", { class: s.failures ? "bad" : null }, seconds(s.longest_s)), h("code", {}, s.name), s.task, s.longest, seconds(s.longest_at), count(s.episodes), mean(s.reset_s, s.resets), mean(s.round_s, s.rounds), s.failures ? h("b", { class: "bad" }, count(s.failures)) : "0",
    ]));
  }

  // --- trajectories ----------------------------------------------------------------------------------------------

  function trajectories() {
    const which = byId("which"), node = byId("trajectory");
    if (!D.samples.length) {
      which.hidden = true;
      return node.append(h("p", { class: "muted" }, "No trajectories were sampled in this run folder."));
    }
    const groups = new Map();
    for (const [index, sample] of D.samples.entries()) {
      const name = `${sample.task}, ${sample.kind === "eval" ? "held-out" : sample.kind}`;
      if (!groups.has(name)) groups.set(name, h("optgroup", { label: name }));
      const reward = sample.reward === null ? "no reward" : `reward ${number(sample.reward)}`;
      groups.get(name).append(h("option", { value: index }, `step ${sample.step} · ${reward} · ${words(sample.outcome)} · ${sample.task} #${sample.trajectory}`));
    }
    which.append(...groups.values());
    let by = "log-probability";
    const tint = (token) => by === "version" ? `color-mix(in srgb, ${colours[token[3] % 6]} 32%, transparent)` : `rgb(var(--rgb-bad) / ${Math.min(0.85, -token[2] / 4).toFixed(2)})`;
    const shown = (text) => (text ? text.replaceAll("\n", "↵\n") : "▪");
    const tokenNode = (token, sample) => {
      const [text, id, logprob] = token, version = sample.versions[token[3]];
      const label = `${text ? JSON.stringify(text) : "no text of its own"} (token ${id})\nlog-probability ${logprob.toFixed(3)}, so ${share(Math.exp(logprob))}\nsampled with ${version}`;
      const span = h("span", { class: "token", tabindex: "0", style: { background: tint(token) }, "aria-label": label, "data-logprob": logprob, "data-version": version }, shown(text));
      span.addEventListener("focus", () => { const box = span.getBoundingClientRect(); showTip(label, box.left, box.bottom - 12); });
      span.addEventListener("blur", hideTip);
      return withTip(span, () => label);
    };
    const show = () => {
      const sample = D.samples[Number(which.value)];
      hideTip();
      const head = h("p", { class: "note" }, `Trajectory ${sample.trajectory}, prompt ${sample.prompt}, started with the weights of step ${sample.step}: ${words(sample.outcome)}${sample.reward === null ? "" : `, reward ${number(sample.reward)}`}${sample.cause ? `. ${sample.cause}` : ""}`);
      const turns = sample.parts.filter((part) => part.tokens || part.text).map((part) => {
        const role = part.tokens ? [`answer ${part.turn}`, part.earned ? h("div", {}, `earned ${number(part.earned)}`) : null] : part.new_context ? "new context" : "observation";
        return h("div", { class: "turn" }, h("div", { class: "role" }, role), part.tokens ? h("div", { class: "content" }, part.tokens.map((token) => tokenNode(token, sample))) : h("div", { class: "content observed" }, part.text));
      });
      node.replaceChildren(head, ...turns);
      if (sample.left_out) node.append(h("p", { class: "muted" }, `… and ${plural(sample.left_out, "more part")}`));
      byId("token-legend").replaceChildren(...(by === "version"
        ? sample.versions.map((version, i) => h("span", {}, h("i", { style: { background: tint([0, 0, 0, i]) } }), version))
        : [[1, "100 %"], [0.37, "37 %"], [0.1, "10 %"], [0.03, "3 % or less"]].map(([p, name]) => h("span", {}, h("i", { style: { background: tint([0, 0, Math.log(p), 0]), border: "1px solid var(--line)" } }), name))));
    };
    const buttons = ["log-probability", "version"].map((name) => h("button", { type: "button", "aria-pressed": String(name === by), on: { click: (event) => {
      by = name;
      for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.target));
      show();
    } } }, `by ${name}`));
    byId("colouring").append(...buttons);
    which.addEventListener("change", show);
    const turns = (sample) => sample.parts.filter((part) => part.tokens).length;
    const longest = D.samples.reduce((best, sample, i) => (turns(sample) > turns(D.samples[best]) ? i : best), 0);
    which.value = String(longest);
    show();
  }

  // --- main ------------------------------------------------------------------------------------------------------

  summary();
  learning();
  timeline();
  idle();
  affinity();
  staleness();
  outcomes();
  bias();
  environments();
  trajectories();
  training();
  if (D.config) byId("settings").textContent = JSON.stringify(D.config, null, 2);
  else byId("config").hidden = true;
  byId("contents").append(...[...document.querySelectorAll("main section[id]:not(#summary):not([hidden])")].map((section) => h("a", { href: `#${section.id}` }, section.querySelector("h2").textContent)));
  byId("foot").textContent = `Generated from the journal of ${D.folder}; times are on the controller's clock. This page loads nothing from the network.`;
  document.body.dataset.drawn = "yes";
})();
