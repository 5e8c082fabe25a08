"use strict";
// Everything that comes from outside reaches the document through textContent; nothing is ever parsed as HTML.
// One request a second while the page is visible. The strip is only redrawn when there are new steps.

const REFRESH_MS = 1000;
const SVG = "http://www.w3.org/2000/svg";
const find = (id) => document.getElementById(id);

let key = sessionStorage.getItem("gapless-key") || "";

function make(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = String(text);
  if (className) node.className = className;
  return node;
}

function headers(more) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : { ...more };
}

// ---- numbers as text

function count(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["", "k", "M", "G"]) {
    if (Math.abs(value) < 1000 || unit === "G") return `${Number(value.toPrecision(3))}${unit}`;
    value /= 1000;
  }
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(value) < 1024 || unit === "GiB") return `${Number(value.toPrecision(4))} ${unit}`;
    value /= 1024;
  }
}

const whole = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));
const share = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`);
const milliseconds = (value) => (value >= 1000 ? `${(value / 1000).toPrecision(3)} s` : `${Number(value.toPrecision(3))} ms`);

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// ---- the live part

function tile(name, value, detail) {
  const box = make("div");
  const shown = make("dd", value);
  if (detail) shown.append(make("small", detail));
  box.append(make("dt", name), shown);
  return box;
}

function latencyTile(name, found) {
  if (!found) return tile(name, "–", "nothing in the last minute");
  return tile(name, milliseconds(found.p50), `p95 ${milliseconds(found.p95)}`);
}

function drawTiles(data) {
  const { now, series, latency, eager, ladder } = data;
  const last = (name) => (series[name].length ? series[name][series[name].length - 1] : null);
  const replays = ladder.reduce((sum, row) => sum + row.count, 0);
  const eagerSteps = eager.reduce((sum, row) => sum + row.count, 0);
  const usedBlocks = now.num_blocks === null ? null : now.num_blocks - now.num_free_blocks;
  find("tiles").replaceChildren(
    tile("tokens/s out", count(last("tokens_out_per_s")), `${whole(now.generation_tokens)} in all`),
    tile("tokens/s in", count(last("tokens_in_per_s")), `${whole(now.prompt_tokens)} in all`),
    latencyTile("to the first token, p50", latency.ttft_ms),
    latencyTile("between tokens, p50", latency.itl_ms),
    tile("running", whole(now.num_running), `of ${whole(data.server.max_running_requests)}`),
    tile("waiting", whole(now.num_waiting), `${whole(now.num_preemptions)} preemptions`),
    tile("KV cache", share(now.kv_usage), `${whole(usedBlocks)} of ${whole(now.num_blocks)} blocks`),
    tile("prefix hits", share(now.prefix_hit_rate), "of prompt tokens"),
    tile("replays", count(replays), `${count(eagerSteps)} eager`),
    tile("graphs", whole(now.num_graphs), `${bytes(now.pool_bytes)} pool, captured in ${(now.capture_s || 0).toFixed(1)} s`),
  );
}

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((top) => top >= value);
}

function drawCurves(id, ages, curves, format, top) {
  const width = 400, height = 120, left = 46, right = 4, bottom = 18, seconds = 120;
  const highest = Math.max(0, ...curves.flatMap((curve) => curve.values));
  const limit = top || (highest > 0 ? niceTop(highest) : 1);
  const x = (age) => left + (width - left - right) * (1 - Math.min(age, seconds) / seconds);
  const y = (value) => 6 + (height - bottom - 6) * (1 - value / limit);
  const parts = [0, 0.5, 1].flatMap((part) => [
    svg("line", { class: "grid", x1: left, x2: width - right, y1: y(part * limit), y2: y(part * limit) }),
    svg("text", { x: left - 5, y: y(part * limit) + 4, "text-anchor": "end" }, format(part * limit)),
  ]);
  parts.push(svg("text", { x: left, y: height - 3 }, "2 min ago"));
  parts.push(svg("text", { x: width - right, y: height - 3, "text-anchor": "end" }, "now"));
  for (const curve of curves) {
    const points = curve.values.map((value, i) => `${x(ages[i]).toFixed(1)},${y(value).toFixed(1)}`);
    parts.push(svg("polyline", { class: `curve ${curve.name}`, points: points.join(" ") }));
  }
  const root = find(id);
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  root.replaceChildren(...parts);
}

function drawPlots({ series }) {
  const out = (values) => ({ name: "out", values });
  const into = (values) => ({ name: "in", values });
  drawCurves("plot-tokens", series.age_s, [out(series.tokens_out_per_s), into(series.tokens_in_per_s)], count);
  drawCurves("plot-requests", series.age_s, [out(series.running), into(series.waiting)], count);
  drawCurves("plot-kv", series.age_s, [out(series.kv_usage)], (value) => `${100 * value}%`, 1);
}

// ---- the strip of steps: [phase, strategy, size, real, reason, ms]

let steps = [];
let lastStep = 0; // number of the newest step in the strip, counted from the engine's start
let marked = null; // number of the marked step; null follows the newest

function drawSteps(data) {
  const newest = data.now.num_steps || 0;
  if (newest === lastStep && steps.length === data.steps.length) return;
  steps = data.steps;
  lastStep = newest;
  const slowest = Math.max(0.001, ...steps.map((step) => step[5]));
  find("strip-top").textContent = steps.length ? milliseconds(slowest) : "none yet";
  find("strip").replaceChildren(...steps.map(([, strategy, , , reason, ms]) => {
    const bar = make("i", null, strategy);
    if (reason && strategy !== "eager") bar.classList.add("part");
    bar.style.height = `${Math.max(4, (100 * ms) / slowest)}%`;
    return bar;
  }));
  drawLegend();
  drawMark();
}

function drawLegend() {
  const counts = new Map();
  for (const [, strategy, , , reason] of steps) {
    counts.set(strategy, (counts.get(strategy) || 0) + 1);
    if (reason && strategy !== "eager") counts.set("partly eager", (counts.get("partly eager") || 0) + 1);
  }
  const items = [...counts].flatMap(([name, number]) => [
    make("span", null, `key ${name === "partly eager" ? "eager" : name}`), `${name} ${number}`,
  ]);
  find("strip-legend").replaceChildren(...items);
}

function describe([phase, strategy, size, real, reason, ms]) {
  const unit = phase === "decode" && strategy !== "eager" ? "requests" : "tokens";
  const what = strategy === "eager" ? `eager, ${real} ${unit}` : `${strategy} ${size}, ${real} real ${unit}`;
  return `${phase}: ${what}, ${milliseconds(ms)}${reason ? `. Eager because: ${reason}` : ""}`;
}

function drawMark() {
  const strip = find("strip");
  const first = lastStep - steps.length + 1;
  strip.querySelector(".marked")?.classList.remove("marked");
  if (!steps.length) return;
  if (marked !== null && marked < first) marked = first;
  const number = marked === null ? lastStep : Math.min(marked, lastStep);
  const index = number - first;
  if (marked !== null) strip.children[index].classList.add("marked");
  const text = `step ${whole(number)}, ${describe(steps[index])}`;
  find("strip-detail").textContent = text;
  strip.setAttribute("aria-valuemin", first);
  strip.setAttribute("aria-valuemax", lastStep);
  strip.setAttribute("aria-valuenow", number);
  strip.setAttribute("aria-valuetext", text);
}

find("strip").addEventListener("keydown", (event) => {
  const first = lastStep - steps.length + 1;
  const at = marked === null ? lastStep : marked;
  const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 20, PageDown: at + 20, Home: first, End: null };
  if (event.key === "Escape") marked = null;
  else if (event.key in moves) marked = moves[event.key];
  else return;
  if (marked !== null) marked = Math.max(first, Math.min(lastStep, marked));
  event.preventDefault();
  drawMark();
});

find("strip").addEventListener("pointermove", (event) => {
  const index = [...find("strip").children].indexOf(event.target);
  if (index < 0) return;
  marked = lastStep - steps.length + 1 + index;
  drawMark();
});

find("strip").addEventListener("pointerleave", () => {
  marked = null;
  drawMark();
});

// ---- tables

function table(heads, rows, caption) {
  const root = make("table");
  if (caption) root.append(make("caption", caption));
  const head = make("tr");
  for (const name of heads) {
    const cell = make("th", name);
    cell.scope = "col";
    head.append(cell);
  }
  const body = make("tbody");
  for (const cells of rows) {
    const row = make("tr");
    for (const cell of cells) {
      const isNumber = typeof cell === "number";
      const shown = make("td", cell instanceof Node ? null : isNumber ? whole(cell) : cell, isNumber ? "number" : "");
      if (cell instanceof Node) shown.append(cell);
      row.append(shown);
    }
    body.append(row);
  }
  const top = make("thead");
  top.append(head);
  root.append(top, body);
  return root;
}

function usageBar(row, most) {
  const bar = make("div", null, "bar");
  bar.setAttribute("aria-hidden", "true");
  const slots = row.tokens + row.padding;
  for (const [part, className] of [[row.tokens, row.strategy], [row.padding, "rest"]]) {
    const piece = make("i", null, className);
    piece.style.width = slots && most ? `${(100 * row.count * part) / slots / most}%` : "0";
    bar.append(piece);
  }
  return bar;
}

function drawLadder({ ladder }) {
  const phases = [...new Set(ladder.map((row) => row.phase))];
  const tables = phases.map((phase) => {
    const rows = ladder.filter((row) => row.phase === phase);
    const most = Math.max(...rows.map((row) => row.count));
    const cells = rows.map((row) => {
      const slots = row.tokens + row.padding;
      return [row.bucket, row.strategy, row.count, slots ? share(row.padding / slots) : "–", usageBar(row, most)];
    });
    return table(["size", "strategy", "replays", "padding", "replays, and padding in them"], cells, phase);
  });
  find("ladder").replaceChildren(...(tables.length ? tables : [make("p", "No graph was captured.")]));
}

function drawEager({ eager }) {
  const rows = eager.map((row) => [row.phase, row.reason, row.count]);
  const none = make("p", "None: every step was a replay.");
  find("eager").replaceChildren(rows.length ? table(["phase", "reason", "steps"], rows) : none);
}

let shownPlan = "";

function drawPlan({ plan }) {
  const text = JSON.stringify(plan);
  if (text === shownPlan) return;
  shownPlan = text;
  const phases = Object.entries(plan.phases).map(([name, phase]) => [
    name, phase.strategy, phase.sizes.length ? `${phase.sizes.join(", ")} ${phase.unit}` : "none",
  ]);
  const dropped = Object.entries(plan.phases).flatMap(([name, phase]) =>
    (phase.dropped || []).map((lost) => [name, `size ${lost.size}`, "left out", lost.reason]));
  const decisions = plan.decisions.map((one) => {
    const change = one.before === one.after ? one.after : `${one.before} → ${one.after}`;
    return [one.phase || "", one.rule, change, one.reason];
  });
  find("plan").replaceChildren(
    make("p", `Mode: ${plan.mode || "set per phase"}`),
    table(["phase", "strategy", "sizes"], phases),
    table(["phase", "rule", "decision", "reason"], [...decisions, ...dropped], "Decisions"),
  );
}

function drawHead({ server, now, health }) {
  find("model").textContent = server.model;
  document.title = `${server.model} – Gapless`;
  find("facts").textContent = [
    server.device, `context ${whole(server.max_model_len)}`, `up ${duration(now.uptime_s)}`,
    `ready in ${server.startup_s.toFixed(1)} s`, `version ${server.version}`,
  ].join(" · ");
  if (health.is_draining) notice("The server is shutting down: it finishes what runs and takes nothing new.");
  else if (!health.is_healthy) notice("The engine has stopped.");
  else if (health.replicas.some((replica) => !replica.is_healthy)) notice(degraded(health.replicas));
  else if (health.step_age_s > 30) notice(`The engine's loop has shown no life for ${duration(health.step_age_s)}.`);
  else notice("");
}

function degraded(replicas) {
  const down = replicas.filter((replica) => !replica.is_healthy).map((replica) => replica.index);
  return `Degraded: of ${whole(replicas.length)} replicas these are down: ${down.join(", ")}.`;
}

function notice(text) {
  if (find("notice").textContent !== text) find("notice").textContent = text;
}

// ---- the loop

async function refresh() {
  let response;
  try {
    response = await fetch(new URL("dashboard/data", location.href), { headers: headers(), cache: "no-store" });
  } catch {
    notice("The server does not answer.");
    return;
  }
  const needsKey = response.status === 401;
  if (needsKey && find("key-form").hidden) {
    find("key-form").hidden = false;
    find("key").focus();
  }
  if (!response.ok) {
    notice(needsKey ? (key ? "The server does not know this key." : "The server asks for an API key.") : `The server answers ${response.status}.`);
    return;
  }
  find("key-form").hidden = true;
  const data = await response.json();
  for (const draw of [drawHead, drawTiles, drawPlots, drawSteps, drawEager, drawLadder, drawPlan]) draw(data);
  modelName = data.server.model;
  if (!data.server.can_chat && !conversation.length) find("chat-state").textContent = "This model has no chat template: what you write is continued as text.";
  canChat = data.server.can_chat;
}

async function run() {
  for (;;) {
    if (document.visibilityState === "visible") await refresh();
    await new Promise((resolve) => { setTimeout(resolve, REFRESH_MS); wake = resolve; });
  }
}

let wake = () => {};
document.addEventListener("visibilitychange", () => wake());

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("key").value.trim();
  sessionStorage.setItem("gapless-key", key);
  find("key").value = "";
  wake();
});

// ---- chat

let modelName = "";
let canChat = true;
let conversation = [];
let running = null; // AbortController of the answer that is being written

function addTurn(who) {
  const turn = make("div", null, "turn");
  const text = make("span");
  turn.append(make("b", who), text);
  find("chat-log").append(turn);
  return text;
}

async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = response.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const frames = rest.split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith("data: ")) yield frame.slice(6);
    }
  }
}

async function ask(text) {
  const log = find("chat-log");
  addTurn("You").textContent = text;
  const answer = addTurn("Model");
  const turns = conversation; // a new conversation may begin before this answer has ended
  turns.push({ role: "user", content: text });
  const common = {
    model: modelName, stream: true, stream_options: { include_usage: true },
    max_tokens: find("chat-max").valueAsNumber || 256, temperature: find("chat-temperature").valueAsNumber || 0,
  };
  const body = canChat ? { ...common, messages: turns } : { ...common, prompt: text };
  const path = canChat ? "v1/chat/completions" : "v1/completions";
  const start = performance.now();
  let written = "", firstMs = null, usage = null, ended = "", isWhole = false;
  running = new AbortController();
  setRunning(true);
  try {
    const response = await fetch(new URL(path, location.href), {
      method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const data of events(response)) {
      if (data === "[DONE]") { isWhole = true; break; }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage || usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      const piece = canChat ? choice.delta.content || "" : choice.text;
      if (piece && firstMs === null) firstMs = performance.now() - start;
      ended = choice.finish_reason || ended;
      written += piece;
      answer.append(piece);
      log.scrollTop = log.scrollHeight;
    }
    if (!isWhole) throw new Error("the connection was closed before the answer was complete");
    const seconds = (performance.now() - start - firstMs) / 1000;
    const tokens = usage ? usage.completion_tokens : 0;
    const rate = tokens > 1 && seconds > 0 ? `, ${count((tokens - 1) / seconds)} tokens/s` : "";
    chatState(`${tokens} tokens${rate}, first after ${milliseconds(firstMs || 0)}${ended === "length" ? ", cut at the limit" : ""}`);
  } catch (error) {
    chatState(error.name === "AbortError" ? "aborted" : `failed: ${error.message}`);
  }
  if (written) turns.push({ role: "assistant", content: written });
  else turns.pop();
  running = null;
  setRunning(false);
}

function chatState(text) {
  find("chat-state").textContent = text;
}

function setRunning(isRunning) {
  find("chat-send").disabled = isRunning;
  find("chat-abort").disabled = !isRunning;
  if (isRunning) chatState("writing …");
}

find("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("chat-text").value.trim();
  if (!text || running) return;
  find("chat-text").value = "";
  ask(text);
});

find("chat-text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  find("chat-form").requestSubmit();
});

find("chat-abort").addEventListener("click", () => running?.abort());

find("chat-reset").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  find("chat-log").replaceChildren();
  chatState("");
  find("chat-text").focus();
});

run();
