// The live page: draws the data of /live, and streams from the model. Sets text from the server only as text nodes.

const $ = (id) => document.getElementById(id);
const canvases = { output: $("output-chart"), steps: $("steps-chart"), kv: $("kv-map") };
// The windows of rates and charts; page.html shows them.
const RATE_S = 2;
const RUNGS_S = 5;
const CHART_S = 60;

// Numbers.

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

function count(value) {
  return value < 100000 ? grouped.format(value) : compact.format(value);
}

function rate(value) {
  return value > 0 && value < 9.95 ? value.toFixed(1) : count(value);
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1e3)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : `${grouped.format(value)} s`;
}

function duration(value) {
  const minutes = Math.floor(value / 60);
  if (minutes < 1) return `${Math.floor(value)} s`;
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} days`;
}

function set(id, text) {
  const element = $(id);
  if (element.textContent !== text) element.textContent = text;
}

// Server-sent events over fetch, because EventSource cannot send an API key.

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

function headers() {
  const key = $("key").value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function refusal(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not the server's response, but perhaps a proxy's.
  }
  if (response.status === 401) $("key-box").open = true;
  return new Error(message);
}

// Drawing.

let colors = {};

function readColors() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["decode", "prefill", "padding", "cached", "free", "line", "accent"]) {
    colors[name] = style.getPropertyValue(`--${name}`).trim();
  }
}

function draw(canvas, paint) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  paint(pen, width, height);
}

function paintOutput(pen, width, height) {
  const points = ticks.filter((tick) => tick.rate !== undefined);
  pen.fillStyle = colors.line;
  pen.fillRect(0, height - 1, width, 1);
  if (points.length < 2) return;
  const end = points[points.length - 1].now_s;
  const top = Math.max(1, ...points.map((tick) => tick.rate));
  const x = (tick) => width - ((end - tick.now_s) / CHART_S) * width;
  const y = (tick) => height - 2 - (tick.rate / top) * (height - 4);
  pen.beginPath();
  points.forEach((tick, index) => (index ? pen.lineTo(x(tick), y(tick)) : pen.moveTo(x(tick), y(tick))));
  pen.strokeStyle = colors.accent;
  pen.lineWidth = 1.5;
  pen.stroke();
  pen.lineTo(width, height);
  pen.lineTo(x(points[0]), height);
  pen.globalAlpha = 0.12;
  pen.fillStyle = colors.accent;
  pen.fill();
  pen.globalAlpha = 1;
}

const COLUMN = 5;
let steps = [];

function paintSteps(pen, width, height) {
  pen.fillStyle = colors.line;
  pen.fillRect(0, height - 1, width, 1);
  const room = Math.floor(width / COLUMN);
  const shown = steps.slice(-room);
  // The scale of the largest visible bucket, so that small ones stay readable.
  const top = Math.max(8, ...shown.map((step) => step[0]));
  set("top-rung", shown.length ? grouped.format(top) : "–");
  set("num-steps", String(shown.length));
  shown.forEach((step, index) => {
    const x = width - (shown.length - index) * COLUMN;
    let y = height - 1;
    ["decode", "prefill", "padding"].forEach((kind, place) => {
      const size = (step[place + 1] / top) * (height - 2);
      pen.fillStyle = colors[kind];
      pen.fillRect(x, y - size, COLUMN - 1, size);
      y -= size;
    });
  });
}

let cells = [];

function paintMap(pen, width, height) {
  if (!cells.length) return;
  // The largest squares that fit.
  let size = 28;
  while (size > 3 && Math.floor(width / size) * Math.floor(height / size) < cells.length) size -= 1;
  const columns = Math.floor(width / size);
  const gap = size > 6 ? 2 : 1;
  cells.forEach(([held, cached, all], index) => {
    const x = (index % columns) * size;
    const y = Math.floor(index / columns) * size;
    const side = size - gap;
    pen.fillStyle = colors.free;
    pen.fillRect(x, y, side, side);
    const lower = (side * held) / all;
    const upper = (side * cached) / all;
    pen.fillStyle = colors.decode;
    pen.fillRect(x, y + side - lower, side, lower);
    pen.fillStyle = colors.cached;
    pen.fillRect(x, y + side - lower - upper, side, upper);
  });
}

// The engine.

let ticks = [];
const rows = new Map();

function rungRow(tokens) {
  if (!rows.has(tokens)) {
    const row = $("rung").content.firstElementChild.cloneNode(true);
    row.querySelector(".budget").textContent = grouped.format(tokens);
    $("rungs").append(row);
    rows.set(tokens, row);
  }
  return rows.get(tokens);
}

function showRungs(now, before) {
  const elapsed = now.now_s - before.now_s;
  const known = new Map(before.rungs.map((rung) => [rung[0], rung]));
  for (const rung of now.rungs) {
    const old = known.get(rung[0]) ?? rung;
    const [numSteps, decode, prefill, padding] = [2, 3, 4, 5].map((place) => rung[place] - old[place]);
    const deviceS = rung[8] - old[8];
    const total = decode + prefill + padding;
    const row = rungRow(rung[0]);
    const bar = row.querySelector(".bar");
    const shares = [decode, prefill, padding].map((tokens) => (total ? tokens / total : 0));
    [...bar.children].forEach((part, place) => (part.style.width = `${100 * shares[place]}%`));
    row.className = numSteps ? "" : "idle";
    row.cells[2].textContent = total ? `${Math.round(100 * (shares[0] + shares[1]))} %` : "–";
    row.cells[3].textContent = numSteps && elapsed > 0 ? `${rate(numSteps / elapsed)}/s` : "–";
    row.cells[4].textContent = numSteps ? seconds(deviceS / numSteps) : "–";
    bar.setAttribute(
      "aria-label",
      total ? `${Math.round(100 * shares[0])} % decode, ${Math.round(100 * shares[1])} % prefill` : "no step"
    );
  }
}

function since(tick, age) {
  return ticks.find((other) => tick.now_s - other.now_s <= age) ?? tick;
}

function show(tick) {
  setState(tick.state);
  if (tick.model === undefined) return;
  if (ticks.length && tick.output_tokens < ticks[ticks.length - 1].output_tokens) ticks = [];
  const before = since(tick, RATE_S);
  const elapsed = tick.now_s - before.now_s;
  tick.rate = elapsed > 0 ? (tick.output_tokens - before.output_tokens) / elapsed : undefined;
  ticks.push(tick);
  while (tick.now_s - ticks[0].now_s > CHART_S) ticks.shift();
  set("model", tick.model);
  $("model").title = `${tick.model}, ${tick.batching} batching, up ${duration(tick.uptime_s)}`;
  set("version", `Version ${tick.version}, ${tick.batching} batching, up ${duration(tick.uptime_s)}`);
  if (elapsed > 0) {
    set("output-rate", rate(tick.rate));
    set("prefill-rate", rate((tick.prefill_tokens - before.prefill_tokens) / elapsed));
  }
  set("cached-total", `${count(tick.cached_tokens)} tokens`);
  set("running", grouped.format(tick.running));
  set("running-limit", grouped.format(tick.running_limit));
  set("waiting", grouped.format(tick.waiting));
  set("waiting-tokens", count(tick.waiting_tokens));
  ["p50", "p90", "p99"].forEach((name, place) => {
    set(`first-${name}`, seconds(tick.first_token_s[place]));
    set(`gap-${name}`, seconds(tick.gap_s[place]));
  });
  set("first-window", `last ${Math.round(tick.first_token_window_s)} s`);
  set("gap-window", `last ${Math.round(tick.gap_window_s)} s`);
  set("compiles", grouped.format(tick.compiles));
  $("compiles").className = tick.compiles ? "bad" : "";
  set("preemptions", count(tick.preemptions));
  $("drafts-note").hidden = !tick.draft_tokens;
  set("accepted-drafts", count(tick.accepted_draft_tokens));
  set("drafts", count(tick.draft_tokens));
  $("forced-note").hidden = !tick.forced_tokens;
  set("forced", count(tick.forced_tokens));
  for (const element of $("ended").querySelectorAll("dd")) {
    element.textContent = count(tick.finished[element.dataset.reason] ?? 0);
  }
  showRungs(tick, since(tick, RUNGS_S));
  steps = steps.concat(tick.steps).slice(-1000);
  if (tick.kv.map) {
    cells = tick.kv.map;
    const sum = (place) => cells.reduce((total, cell) => total + cell[place], 0);
    const [held, cached, all] = [sum(0), sum(1), sum(2)];
    set("kv-used", count(held));
    set("kv-cached", count(cached));
    set("kv-free", count(all - held - cached));
    set(
      "kv-size",
      `${grouped.format(all)} blocks of ${tick.kv.block_size} tokens, ${Math.round((100 * held) / all)} % in use`
    );
    canvases.kv.setAttribute("aria-label", `Blocks of the KV pool: ${held} in use, ${cached} cached and reclaimable, of ${all}`);
    draw(canvases.kv, paintMap);
  }
  draw(canvases.output, paintOutput);
  draw(canvases.steps, paintSteps);
  offerModes(tick);
  tick.steps = tick.kv = null; // already on the canvases
}

function setState(state) {
  const element = $("state");
  if (element.dataset.state === state) return;
  element.dataset.state = state;
  element.textContent = { engine_dead: "engine dead", starting: "loading" }[state] ?? state;
}

let watching = null;

async function watch() {
  let pause = 500;
  while (!document.hidden) {
    watching = new AbortController();
    try {
      const response = await fetch("/live", { headers: headers(), signal: watching.signal });
      if (!response.ok) throw await refusal(response);
      pause = 500;
      for await (const event of events(response)) show(JSON.parse(event));
    } catch (error) {
      if (error.name !== "AbortError") $("state").title = error.message;
    }
    watching = null;
    if (document.hidden) return;
    setState("disconnected");
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(2 * pause, 5000);
  }
}

// A hidden page sends no requests.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) watching?.abort();
  else if (!watching) watch();
});
$("key").addEventListener("change", () => watching?.abort());

// The playground.

let talk = [];
let playing = null;
let modesOffered = false;

function offerModes(tick) {
  if (modesOffered) return;
  modesOffered = true;
  $("mode").querySelector("[value=chat]").disabled = !tick.chat;
  if (!tick.chat) $("mode").value = "completion";
  $("max_tokens").max = tick.max_model_len;
  $("send").disabled = !tick.text;
  if (!tick.text) set("played", "This model has no tokenizer: it takes token ids alone.");
  if (tick.model === DEMO_MODEL && tick.chat) offerSamples();
  nameMode();
}

// Samples of the demo model's tasks, from its training texts.
const DEMO_MODEL = "sluice-demo";
const PERSON = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" }, city: { type: "string" } },
  required: ["name", "age", "city"],
  additionalProperties: false,
};
const GET_WEATHER = {
  name: "get_weather",
  parameters: {
    type: "object",
    properties: { city: { enum: ["Oslo", "Paris", "Rome"] } },
    required: ["city"],
    additionalProperties: false,
  },
};
const SAMPLES = [
  { name: "Copy", text: "Copy: red cat sun apple" },
  { name: "Reverse", text: "Reverse: red cat sun" },
  { name: "Arithmetic", text: "37 + 5 = ?" },
  { name: "JSON", text: "Make JSON: Mira is 7 years old and lives in Oslo." },
  {
    name: "Recall",
    before: [
      { role: "user", content: "Remember: Mira amber, Tom jazz, Zoe tulips." },
      { role: "assistant", content: "OK." },
    ],
    text: "What goes with Tom?",
  },
  { name: "Story", text: "Tell me a story about Mira and a kite.", temperature: 0.7 },
  {
    name: "Structured output",
    text: "Make JSON: Tom lives in Paris and is 12 years old.",
    body: { response_format: { type: "json_schema", json_schema: { name: "person", schema: PERSON } } },
    with: "with response_format: a JSON schema of name, age and city",
  },
  {
    name: "Tool call",
    text: "What is the weather in Oslo?",
    body: {
      tools: [{ type: "function", function: GET_WEATHER }],
      tool_choice: "required",
      parallel_tool_calls: false,
    },
    with: 'with the tool get_weather and tool_choice "required": the call is valid, its city is a guess',
  },
];
// The sample whose fields the request has, until its text is edited.
let sample = null;

function offerSamples() {
  for (const each of SAMPLES) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = each.name;
    button.title = each.text;
    button.addEventListener("click", () => playSample(each));
    $("samples").append(button);
  }
  $("samples").hidden = false;
}

function playSample(chosen) {
  if (playing) return;
  clearTalk();
  sample = chosen;
  $("mode").value = "chat";
  nameMode();
  $("temperature").value = chosen.temperature ?? 0;
  $("max_tokens").value = 256;
  $("prompt").value = chosen.text;
  for (const message of chosen.before ?? []) {
    talk.push(message);
    showMessage(message.role, message.content);
  }
  $("form").requestSubmit();
}

function nameMode() {
  set("prompt-label", $("mode").value === "chat" ? "Message" : "Text to continue");
}

function line(className, text) {
  const element = document.createElement("p");
  element.className = className;
  element.textContent = text;
  $("talk").append(element);
  $("talk").scrollTop = $("talk").scrollHeight;
  return element;
}

function sampling() {
  const body = {};
  for (const name of ["max_tokens", "temperature", "top_p", "top_k", "seed"]) {
    const value = $(name).value.trim();
    if (value !== "") body[name] = Number(value);
  }
  return body;
}

function showMessage(role, text) {
  $("talk").querySelector(".hint")?.remove();
  line("who", { user: "You", text: "Text" }[role] ?? "Model");
  return line(role === "assistant" ? "answer" : "asked", text);
}

function refuse(message) {
  set("refusal", message);
  if (message) $("prompt").setAttribute("aria-invalid", "true");
  else $("prompt").removeAttribute("aria-invalid");
}

async function play(text) {
  const chat = $("mode").value === "chat";
  const body = { ...sampling(), stream: true, stream_options: { include_usage: true } };
  const extra = chat && sample?.text === text ? sample : null;
  if (chat) Object.assign(body, extra?.body, { messages: [...talk, { role: "user", content: text }] });
  else body.prompt = text;
  const began = performance.now();
  let answer = null;
  const calls = [];
  let first = null;
  let usage = null;
  let reason = null;
  playing = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  refuse("");
  set("played", "waiting for the first token");
  try {
    const response = await fetch(chat ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify(body),
      signal: playing.signal,
    });
    if (!response.ok) throw await refusal(response);
    // Until here the message stays in the input, so the user can correct or resend a refused one.
    if (chat && $("prompt").value === text) $("prompt").value = "";
    showMessage(chat ? "user" : "text", text);
    if (extra?.with) line("with", extra.with);
    answer = showMessage("assistant", "");
    for await (const event of events(response)) {
      if (event === "[DONE]") break;
      const chunk = JSON.parse(event);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      for (const choice of chunk.choices ?? []) {
        let piece = (chat ? choice.delta?.content : choice.text) ?? "";
        // A call's name comes first, and its arguments in pieces.
        for (const { index, id, type, function: part } of choice.delta?.tool_calls ?? []) {
          if (part.name) {
            piece += `${calls.length ? ")\n" : ""}${part.name}(`;
            calls.push({ id, type, function: { name: part.name, arguments: "" } });
          }
          calls[index].function.arguments += part.arguments;
          piece += part.arguments;
        }
        reason = choice.finish_reason ?? reason;
        if (choice.finish_reason && calls.length) piece += ")";
        if (!piece) continue;
        if (first === null) {
          first = performance.now();
          set("played", `first token after ${seconds((first - began) / 1000)}`);
        }
        const box = $("talk");
        const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
        answer.append(piece); // a text node
        if (atEnd) box.scrollTop = box.scrollHeight;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else if (answer) line("error", error.message);
    else {
      refuse(error.message);
      reason = "not sent";
      $("prompt").focus();
    }
  }
  const total = (performance.now() - began) / 1000;
  const parts = [];
  if (first !== null) parts.push(`first token after ${seconds((first - began) / 1000)}`);
  if (usage) {
    parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens in ${seconds(total)}`);
    const streamed = first === null ? 0 : (performance.now() - first) / 1000;
    // A shorter time gives no meaningful rate.
    if (streamed > 0.05) parts.push(`${rate((usage.completion_tokens - 1) / streamed)} tokens/s`);
  }
  if (reason) parts.push(`ended: ${reason}`);
  set("played", parts.join(", ") || "nothing came");
  if (chat && answer?.textContent) {
    const said = calls.length ? { content: null, tool_calls: calls } : { content: answer.textContent };
    talk.push({ role: "user", content: text }, { role: "assistant", ...said });
  }
  playing = null;
  $("send").disabled = false;
  $("stop").disabled = true;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (playing || !text.trim()) return;
  play(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
// The browser shows a validation message only beside a visible field.
$("form").addEventListener("invalid", () => ($("settings").open = true), true);
$("stop").addEventListener("click", () => playing?.abort());
function clearTalk() {
  playing?.abort();
  talk = [];
  sample = null;
  $("talk").replaceChildren();
  refuse("");
  set("played", "\u00a0");
}

$("clear").addEventListener("click", clearTalk);
$("mode").addEventListener("change", nameMode);

if (matchMedia("(max-width: 46rem)").matches) $("settings").open = false;

function redraw() {
  readColors();
  draw(canvases.output, paintOutput);
  draw(canvases.steps, paintSteps);
  draw(canvases.kv, paintMap);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", redraw);
redraw();
watch();
