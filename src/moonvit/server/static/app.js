"use strict";
// The page is one conversation kept in memory: turns already sent, and the pictures and words of the next one.

const $ = (id) => document.getElementById(id);
const state = { model: null, key: sessionStorage.getItem("moonvit-key") || "", turns: [], pictures: [], running: null };

// ---- small helpers --------------------------------------------------------------------------------------------------

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB"];
  for (; value >= 1000 && units.length > 1; value /= 1024) units.shift();
  return `${value < 10 && units[0] !== "B" ? value.toFixed(1) : Math.round(value)} ${units[0]}`;
}

const count = (value) => value.toLocaleString("en");

function showError(text) {
  $("alert-text").textContent = text;
  $("alert").hidden = !text;
}

async function call(path, body, signal) {
  const headers = state.key ? { Authorization: `Bearer ${state.key}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body === undefined ? "GET" : "POST", headers, body, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const detail = await response.json().catch(() => null);
  if (response.status === 401) $("key-form").hidden = false;
  throw new Error(detail?.error?.message || `The server answered with status ${response.status}.`);
}

// ---- the model ------------------------------------------------------------------------------------------------------

async function loadModel() {
  try {
    const model = (await (await call("/v1/models")).json()).data[0];
    state.model = model;
    $("model-name").textContent = model.id;
    const details = Object.entries(model.details)
      .filter(([, value]) => ["string", "number"].includes(typeof value))
      .map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "number" ? count(value) : value}`);
    $("model-facts").textContent = [model.family, `${count(model.max_model_len)} tokens of context`, ...details].join(" · ");
    $("model").title = $("model-facts").textContent;
    $("dot").className = "up";
    $("key-form").hidden = true;
    showError("");
    plan();
  } catch (error) {
    $("dot").className = "down";
    $("model-name").textContent = "not connected";
    showError(error.message);
  }
}

async function loadSamples() {
  const samples = await call("/samples").then((response) => response.json()).catch(() => ({ data: [] }));
  for (const sample of samples.data) {
    const button = make("button", { type: "button", title: sample.name }, make("img", { src: sample.url, alt: sample.name }));
    button.addEventListener("click", async () => {
      const blob = await (await call(sample.url)).blob();
      addFiles([new File([blob], sample.name, { type: blob.type })]);
    });
    $("sample-list").append(button);
  }
  $("samples").hidden = samples.data.length === 0;
}

// ---- pictures -------------------------------------------------------------------------------------------------------

const readUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("the file cannot be read."));
    reader.readAsDataURL(file);
  });

async function addFiles(files) {
  showError("");
  const failures = [];
  for (const file of files) {
    try {
      const url = await readUrl(file);
      // The server looks at the picture before it is accepted here: its word on formats and limits is the one that counts.
      const answer = await (await call("/v1/vision/plan", JSON.stringify({ images: [url] }))).json();
      const image = new Image();
      image.src = url;
      const drawable = await image.decode().then(() => true, () => false);
      state.pictures.push({ name: file.name || "pasted picture", url, image: drawable ? image : null, ...answer.images[0] });
    } catch (error) {
      failures.push(`${file.name || "picture"}: ${error.message.replace(/^image \d+: /, "")}`);
    }
  }
  showError(failures.join("\n"));
  showPictures();
  $("question").focus();
}

/** Draw a picture as the model gets it: resized, padded, cut into patches (thin) and tokens (thick). */
function draw(canvas, picture, width) {
  const [, rows, columns] = picture.grid;
  const [paddedWidth, paddedHeight] = picture.padded;
  const height = Math.max(1, Math.round((width * paddedHeight) / paddedWidth));
  const density = window.devicePixelRatio || 1;
  canvas.width = width * density;
  canvas.height = height * density;
  canvas.style.width = `${width}px`;
  const pen = canvas.getContext("2d");
  pen.scale(density, density);
  const scale = width / paddedWidth;
  const [right, bottom] = [picture.resized[0] * scale, picture.resized[1] * scale];
  pen.fillRect(0, 0, width, height);
  // Where the model crops instead of padding, the middle is kept.
  const [left, top] = [Math.min(0, width - right) / 2, Math.min(0, height - bottom) / 2];
  if (picture.image) pen.drawImage(picture.image, left, top, right, bottom);

  const padding = new Path2D();
  padding.rect(right, 0, width - right, height);
  padding.rect(0, bottom, right, height - bottom);
  pen.save();
  pen.clip(padding);
  pen.strokeStyle = "rgb(255 190 90 / .75)";
  pen.beginPath();
  for (let x = -height; x < width; x += 6) pen.moveTo(x, height), pen.lineTo(x + height, 0);
  pen.stroke();
  pen.restore();

  const merge = state.model.merge_size;
  const lines = (step, color, thick) => {
    pen.strokeStyle = color;
    pen.lineWidth = thick;
    pen.beginPath();
    for (let x = 0; x < width + 1; x += (step * width) / columns) pen.moveTo(x, 0), pen.lineTo(x, height);
    for (let y = 0; y < height + 1; y += (step * height) / rows) pen.moveTo(0, y), pen.lineTo(width, y);
    pen.stroke();
  };
  const cell = width / columns;
  if (cell >= 4) {
    lines(1, "rgb(0 0 0 / .2)", 1.4);
    lines(1, "rgb(255 255 255 / .5)", 0.6);
  }
  const strong = Math.min(1, cell / 12);
  lines(merge, `rgb(0 0 0 / ${0.3 + 0.3 * strong})`, 1.2 + 1.6 * strong);
  lines(merge, `rgb(170 170 255 / ${0.6 + 0.4 * strong})`, 0.6 + strong);
}

function facts(picture) {
  const [, rows, columns] = picture.grid;
  const [width, height] = picture.size;
  const [newWidth, newHeight] = picture.resized;
  const resized = newWidth === width && newHeight === height ? "" : ` → ${count(newWidth)} × ${count(newHeight)}`;
  return `${count(width)} × ${count(height)} px${resized} → ${columns} × ${rows} patches → `;
}

/** How wide a picture is drawn so that it is neither tiny nor taller than its room. */
function fit(picture, width, height) {
  const [w, h] = picture.padded;
  return Math.max(2, Math.floor(Math.min(width, (height * w) / h)));
}

function enlarge(picture) {
  $("large-text").textContent = `${picture.name}: ${facts(picture)}${count(picture.tokens)} tokens`;
  draw($("large-canvas"), picture, fit(picture, innerWidth * 0.92, innerHeight * 0.84));
  $("large").showModal();
}

function viewButton(picture, width, height, className) {
  const canvas = make("canvas");
  draw(canvas, picture, fit(picture, width, height));
  const button = make("button", { type: "button", className }, canvas);
  button.setAttribute("aria-label", `Enlarge ${picture.name}`);
  button.addEventListener("click", () => enlarge(picture));
  return button;
}

function showPictures() {
  const room = $("pictures");
  const narrow = matchMedia("(max-width: 56rem)").matches;
  const [width, height] = narrow ? [182, 130] : [Math.max(120, room.clientWidth - 2), 320];
  const cards = state.pictures.map((picture, index) => {
    const remove = make("button", { type: "button", className: "quiet", textContent: "✕" });
    remove.setAttribute("aria-label", `Remove ${picture.name}`);
    remove.addEventListener("click", () => {
      state.pictures.splice(index, 1);
      showPictures();
      $("question").focus();
    });
    const tokens = make("strong", { textContent: `${count(picture.tokens)} ${picture.tokens === 1 ? "token" : "tokens"}` });
    const note = picture.image ? "" : " (this browser cannot show the format)";
    return make(
      "figure",
      { className: "picture" },
      viewButton(picture, width, height, "view"),
      make(
        "figcaption",
        {},
        make("b", { textContent: picture.name, title: picture.name }),
        remove,
        make("span", { className: "facts" }, facts(picture), tokens, note),
      ),
    );
  });
  $("drop").hidden = cards.length > 0;
  room.replaceChildren($("drop"), ...cards);
  plan();
}

// ---- the request and its cost ---------------------------------------------------------------------------------------

const whole = (picture) => ({ type: "image_url", image_url: { url: picture.url } });
const sizeOnly = ({ size: [width, height] }) => ({ type: "image_size", image_size: { width, height } });

function turns(next) {
  const kept = state.turns.filter((turn) => !turn.lost && (turn.role === "user" || turn.text));
  return next.text || next.pictures.length ? [...kept, next] : kept;
}

const messages = (next, picturePart) =>
  turns(next).map(({ role, text, reasoning, pictures }) => {
    if (role === "assistant") return { role, content: text, ...(reasoning && { reasoning_content: reasoning }) };
    return { role, content: [...pictures.map(picturePart), ...(text ? [{ type: "text", text }] : [])] };
  });

const draft = () => ({ role: "user", text: $("question").value.trim(), pictures: state.pictures });

function thinking() {
  const choice = $("thinking").value;
  return choice ? { chat_template_kwargs: { thinking: choice === "on" } } : {};
}

let planTimer = 0;
let planRun = null;
let planError = "";
function plan() {
  clearTimeout(planTimer);
  $("cost").classList.add("stale");
  planTimer = setTimeout(planNow, 120);
}

async function planNow() {
  planRun?.abort();
  const run = (planRun = new AbortController());
  const sent = messages(draft(), sizeOnly);
  let cost = { prompt_tokens: 0, image_tokens: 0, peak_bytes: 0, max_context: state.model?.max_model_len || 0 };
  try {
    if (sent.length) {
      const body = JSON.stringify({ messages: sent, ...thinking() });
      cost = await (await call("/v1/vision/plan", body, run.signal)).json();
    }
  } catch (error) {
    if (error.name !== "AbortError") showError((planError = error.message));
    return;
  }
  if (planError && $("alert-text").textContent === planError) showError("");
  const addresses = turns(draft()).flatMap((turn) => turn.pictures || []).reduce((sum, { url }) => sum + url.length, 0);
  const rest = chatBody(draft(), () => whole({ url: "" }));
  const upload = sent.length ? addresses + new Blob([JSON.stringify(rest)]).size : 0;
  $("tokens").textContent = count(cost.prompt_tokens);
  $("image-tokens").textContent = count(cost.image_tokens);
  $("memory").textContent = bytes(cost.peak_bytes);
  $("upload").textContent = bytes(upload);
  $("context-text").textContent = `${count(cost.prompt_tokens)} of ${count(cost.max_context)} tokens of context`;
  Object.assign($("meter"), { max: cost.max_context || 1, high: cost.max_context * 0.8, value: cost.prompt_tokens });
  $("cost").classList.remove("stale");
}

function chatBody(next, picturePart = whole) {
  const body = { model: state.model?.id, messages: messages(next, picturePart) };
  Object.assign(body, { stream: true, stream_options: { include_usage: true } });
  for (const [field, id] of [["max_tokens", "max-tokens"], ["temperature", "temperature"], ["seed", "seed"]]) {
    if ($(id).value !== "") body[field] = Number($(id).value);
  }
  return { ...body, ...thinking() };
}

// ---- asking ---------------------------------------------------------------------------------------------------------

/** Server-sent events of a response, as parsed JSON documents. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The connection broke before the answer was complete.");
    const pieces = (rest + value).split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) {
      if (!piece.startsWith("data: ")) continue;
      const data = piece.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function turnElement(turn) {
  const element = make("div", { className: `turn ${turn.role}` });
  if (turn.pictures?.length) {
    element.append(make("div", { className: "thumbs" }, ...turn.pictures.map((picture) => viewButton(picture, 170, 130, ""))));
  }
  if (turn.role === "assistant") {
    turn.folded = make("details", { hidden: true }, make("summary", { textContent: "Thinking" }), make("div"));
    element.append(turn.folded);
  }
  turn.body = make("div", { className: "text", textContent: turn.text });
  turn.note = make("div", { className: "note" });
  element.append(turn.body, turn.note);
  turn.element = element;
  $("empty").hidden = true;
  $("log").append(element);
  $("log").scrollTop = $("log").scrollHeight;
  return element;
}

function setBusy(run) {
  state.running = run;
  $("send").hidden = Boolean(run);
  $("stop").hidden = !run;
  $("new").disabled = Boolean(run) || state.turns.length === 0;
}

function grow(turn, choice) {
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  const { content = "", reasoning_content: reasoning = "", tool_calls: calls = [] } = choice.delta;
  turn.reasoning += reasoning;
  turn.text += content;
  for (const piece of calls) turn.text += `${piece.function.name ? `\n${piece.function.name} ` : ""}${piece.function.arguments}`;
  turn.folded.hidden = !turn.reasoning;
  turn.folded.lastChild.textContent = turn.reasoning;
  turn.body.textContent = turn.text;
  turn.finish = choice.finish_reason || turn.finish;
  if (atEnd) log.scrollTop = log.scrollHeight;
}

async function ask() {
  const question = draft();
  if (state.running || (!question.text && !question.pictures.length)) return;
  showError("");
  const body = JSON.stringify(chatBody(question));
  const answer = { role: "assistant", text: "", reasoning: "", finish: null };
  state.turns.push(question, answer);
  turnElement(question);
  turnElement(answer).classList.add("busy");
  $("question").value = "";
  state.pictures = [];
  showPictures();
  const run = new AbortController();
  setBusy(run);
  const start = performance.now();
  let usage = null;
  let first = 0;
  try {
    const response = await call("/v1/chat/completions", body, run.signal);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      for (const choice of event.choices) {
        first ||= performance.now();
        grow(answer, choice);
      }
    }
    answer.note.textContent = summary(answer, usage, first - start, performance.now() - first);
  } catch (error) {
    if (run.signal.aborted) {
      answer.note.textContent = "stopped";
    } else {
      showError(error.message);
      takeBack(question, answer);
    }
  }
  answer.element.classList.remove("busy");
  // An answer without words cannot be sent back as history, so its question does not go either.
  if (!answer.text) {
    question.lost = answer.lost = true;
    for (const turn of [question, answer]) turn.element.classList.add("lost");
  }
  setBusy(null);
  plan();
  $("question").focus();
}

function summary(answer, usage, wait, stream) {
  const notes = [];
  if (answer.finish === "length") notes.push(answer.text ? "cut at the longest answer" : "the longest answer was reached while thinking");
  if (usage) {
    const detail = usage.prompt_tokens_details.image_tokens ? ` (${count(usage.prompt_tokens_details.image_tokens)} from pictures)` : "";
    notes.push(`${count(usage.prompt_tokens)} tokens in${detail}, ${count(usage.completion_tokens)} out`);
  }
  notes.push(`first after ${(wait / 1000).toFixed(2)} s, all after ${((wait + stream) / 1000).toFixed(2)} s`);
  return notes.join(" · ");
}

/** A request that failed leaves the conversation; its words and pictures return to be mended. */
function takeBack(question, answer) {
  state.turns = state.turns.filter((turn) => turn !== question && turn !== answer);
  question.element.remove();
  answer.element.remove();
  $("empty").hidden = state.turns.length > 0;
  if (!$("question").value) $("question").value = question.text;
  state.pictures = [...question.pictures, ...state.pictures];
  showPictures();
}

// ---- wiring ---------------------------------------------------------------------------------------------------------

$("ask").addEventListener("submit", (event) => (event.preventDefault(), ask()));
$("question").addEventListener("input", plan);
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
$("stop").addEventListener("click", () => state.running?.abort());
$("alert-close").addEventListener("click", () => showError(""));
$("thinking").addEventListener("change", plan);
for (const id of ["choose", "drop"]) $(id).addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => {
  addFiles([...$("files").files]);
  $("files").value = "";
});
$("new").addEventListener("click", () => {
  for (const turn of state.turns) turn.element.remove();
  state.turns = [];
  $("empty").hidden = false;
  setBusy(null);
  plan();
  $("question").focus();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = $("key").value;
  sessionStorage.setItem("moonvit-key", state.key);
  $("key").value = "";
  loadModel();
});
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  localStorage.setItem("moonvit-theme", (root.dataset.theme = dark ? "light" : "dark"));
});
document.documentElement.dataset.theme = localStorage.getItem("moonvit-theme") || "";
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("large").open) {
    if ($("options").open) $("options").open = false;
    else state.running?.abort();
  }
});
document.addEventListener("click", (event) => {
  if (!$("options").contains(event.target)) $("options").open = false;
});
document.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (files.length) {
    event.preventDefault();
    addFiles(files);
  }
});

let dragDepth = 0;
const dragging = (change) => {
  dragDepth = Math.max(0, dragDepth + change);
  document.body.classList.toggle("dragging", dragDepth > 0);
};
document.addEventListener("dragenter", () => dragging(1));
document.addEventListener("dragleave", () => dragging(-1));
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  dragging(-dragDepth);
  addFiles([...event.dataTransfer.files]);
});

let resizeTimer = 0;
addEventListener("resize", () => {
  clearTimeout(resizeTimer);
  resizeTimer = setTimeout(showPictures, 150);
});

loadModel();
loadSamples();
