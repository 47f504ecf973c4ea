// The conversation: what was said, what is asked of the server, and what the keys do.

import { chatChunks, getJson } from "./api.js";
import { Pictures } from "./pictures.js";
import { apiKey, requestOptions, setUpSettings, systemPrompt } from "./settings.js";
import { startStrip } from "./strip.js";
import { AnswerTurn, userTurn } from "./turns.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
const turns = $("turns");
const prompt = $("prompt");

let messages = []; // of the API
let model = null; // as the server describes it, or null while it has not answered
let running = null; // the AbortController of the answer that is written
let lastAnswer = null; // its turn, the only one that can be asked for again

const pictures = new Pictures({
  allowed: () => model?.images !== false,
  changed: showState,
  notify,
});

function notify(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function showState() {
  const something = prompt.value.trim() !== "" || pictures.count > 0;
  $("send").disabled = !something || running !== null;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("empty").hidden = turns.children.length > 0;
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, window.innerHeight * 0.4)}px`;
}

function atEnd() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

let follows = true; // whether the view stays at the end of a growing text
log.addEventListener("scroll", () => (follows = atEnd()), { passive: true });
turns.addEventListener("grown", () => {
  if (follows) log.scrollTop = log.scrollHeight;
});

function toEnd() {
  follows = true;
  log.scrollTop = log.scrollHeight;
}

async function findModel() {
  try {
    const list = await getJson("v1/models", apiKey());
    model = list.data?.[0] ?? null;
  } catch (error) {
    model = null;
    notify(error.status === 401 ? "This server asks for an API key: enter it in Settings." : error.message);
  }
  $("model-name").textContent = model?.id ?? "Chat";
  document.title = model?.id ?? "Chat";
  const images = model !== null && model.images !== false;
  $("attach").hidden = !images;
  $("images-hint").hidden = !images;
}

function send() {
  const text = prompt.value.trim();
  if (running || (!text && !pictures.count)) return;
  const images = pictures.take();
  const parts = images.map((image) => ({ type: "image_url", image_url: { url: image.url } }));
  if (text) parts.push({ type: "text", text });
  prompt.value = "";
  lastAnswer?.results?.remove();
  const turn = userTurn(text, images);
  const before = messages.length;
  turns.append(turn);
  messages.push({ role: "user", content: images.length ? parts : text });
  answer(() => {
    messages.length = before;
    turn.remove();
    prompt.value = prompt.value.trim() ? prompt.value : text;
    pictures.put(images);
    prompt.focus();
  });
}

/** Ask for an answer to the messages so far, and show it as it comes. `unsay`: takes the question back. */
async function answer(unsay) {
  notify("");
  lastAnswer?.settle();
  const turn = new AnswerTurn();
  const controller = new AbortController();
  const asked = messages;
  const before = messages.length;
  lastAnswer = turn;
  running = controller;
  turns.append(turn.node);
  showState();
  toEnd();

  function takeBack(then) {
    messages.length = before;
    turn.node.remove();
    lastAnswer = null;
    then();
    showState();
  }
  const retry = () => takeBack(() => answer(unsay));
  const edit = unsay && (() => takeBack(unsay));
  let note = "";
  let usage = null;
  let reason = null;
  try {
    if (model === null) await findModel();
    const system = systemPrompt();
    const body = {
      model: model?.id ?? "",
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      stream: true,
      stream_options: { include_usage: true },
      ...requestOptions(),
    };
    for await (const chunk of chatChunks(body, apiKey(), controller.signal)) {
      const choice = chunk.choices?.[0];
      if (choice?.delta) turn.add(choice.delta);
      reason = choice?.finish_reason ?? reason;
      usage = chunk.usage ?? usage;
    }
    if (reason === "length") note = "cut off: no more tokens allowed";
  } catch (error) {
    if (error.name === "AbortError") note = "stopped";
    else turn.fail(error);
  }
  running = running === controller ? null : running;
  turn.end({ note, usage, retry, edit });
  if (asked === messages) {
    if (!turn.isEmpty) messages.push(turn.message);
    if (reason === "tool_calls") {
      turn.askResults((results) => {
        messages.push(...results);
        answer();
      });
    }
  }
  showState();
  if (follows) toEnd();
}

function stop() {
  running?.abort();
}

function newChat() {
  stop();
  running = null;
  messages = [];
  lastAnswer = null;
  turns.replaceChildren();
  pictures.take();
  notify("");
  showState();
  prompt.focus();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !$("settings").open) {
    event.preventDefault();
    stop();
    prompt.focus();
  }
});
prompt.addEventListener("input", showState);
$("stop").addEventListener("click", stop);
$("new-chat").addEventListener("click", newChat);

setUpSettings(() => {
  notify("");
  findModel();
});
findModel();
startStrip(apiKey);
showState();
prompt.focus();
