// How the turns of a conversation look. Everything that comes from outside is put in as text.

import { codeBlock, renderMarkdown } from "./markdown.js";

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

function make(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function button(text, action) {
  const node = make("button", "plain small", text);
  node.type = "button";
  node.addEventListener("click", action);
  return node;
}

/** A turn of the user: text and images. */
export function userTurn(text, images) {
  const turn = make("article", "turn user");
  turn.setAttribute("aria-label", "You");
  if (images.length) {
    const row = make("div", "pictures");
    for (const image of images) {
      const picture = make("img");
      picture.src = image.url;
      picture.alt = image.name;
      row.append(picture);
    }
    turn.append(row);
  }
  if (text) turn.append(make("p", "said", text));
  return turn;
}

/** A turn of the model while it is written, and after. */
export class AnswerTurn {
  #reasoning = "";
  #content = "";
  #calls = [];
  #drawn = 0; // of an animation frame that is asked for
  #begun = performance.now();
  #firstToken = 0;
  #thoughtFor = 0;
  #opened = false; // by the user, or shut: then it stays as it is

  constructor() {
    this.node = make("article", "turn answer");
    this.node.setAttribute("aria-label", "Answer");
    this.node.setAttribute("aria-busy", "true");
    this.waiting = make("p", "waiting", "Waiting for the server");
    this.thinking = make("details", "thinking");
    this.summary = make("summary", "", "Thinking");
    this.thought = make("div", "thought");
    this.thinking.append(this.summary, this.thought);
    this.thinking.hidden = true;
    this.summary.addEventListener("click", () => (this.#opened = true));
    this.body = make("div", "markdown");
    this.calls = make("div", "calls");
    this.foot = make("footer", "foot");
    this.node.append(this.waiting, this.thinking, this.body, this.calls, this.foot);
  }

  get message() {
    const message = { role: "assistant", content: this.#content };
    if (this.#reasoning) message.reasoning_content = this.#reasoning;
    const calls = this.#calls.filter(Boolean);
    if (calls.length) message.tool_calls = calls;
    return message;
  }

  get isEmpty() {
    return !this.#content && !this.#reasoning && !this.#calls.length;
  }

  /** More of the answer: a delta of a chat completion. */
  add(delta) {
    const reasoning = delta.reasoning_content ?? "";
    const content = delta.content ?? "";
    const calls = delta.tool_calls ?? [];
    if (!reasoning && !content && !calls.length) return;
    this.#firstToken ||= performance.now();
    this.#reasoning += reasoning;
    this.#content += content;
    for (const piece of calls) {
      const call = (this.#calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      call.id ||= piece.id ?? "";
      call.function.name += piece.function?.name ?? "";
      call.function.arguments += piece.function?.arguments ?? "";
    }
    if (this.#reasoning && !this.#thoughtFor && (content || calls.length)) this.#endThought();
    this.#draw();
  }

  #endThought() {
    this.#thoughtFor = (performance.now() - this.#firstToken) / 1000;
    if (!this.#opened) this.thinking.open = false;
  }

  #draw() {
    this.#drawn ||= requestAnimationFrame(() => this.#show());
  }

  #show() {
    this.#drawn = 0;
    this.waiting.hidden = true;
    if (this.#reasoning) {
      if (this.thinking.hidden && !this.#thoughtFor) this.thinking.open = true;
      this.thinking.hidden = false;
      this.summary.textContent = this.#thoughtFor ? thought(this.#thoughtFor) : "Thinking";
      this.thinking.classList.toggle("running", !this.#thoughtFor);
      this.thought.textContent = this.#reasoning.trim();
    }
    renderMarkdown(this.body, this.#content);
    this.calls.replaceChildren(...this.#calls.filter(Boolean).map(callView));
    this.node.dispatchEvent(new CustomEvent("grown", { bubbles: true }));
  }

  /** The end of the answer: how it ended, its usage, and what can be done with it. */
  end({ note, usage, retry, edit }) {
    cancelAnimationFrame(this.#drawn);
    if (this.#reasoning && !this.#thoughtFor) this.#endThought();
    this.#show();
    this.node.removeAttribute("aria-busy");
    const facts = [];
    if (note) facts.push(note);
    if (usage) {
      facts.push(`${usage.completion_tokens} tokens`);
      const seconds = (performance.now() - this.#firstToken) / 1000;
      if (usage.completion_tokens > 1 && seconds > 0) {
        facts.push(`${number.format((usage.completion_tokens - 1) / seconds)} per second`);
      }
      if (this.#firstToken) facts.push(`first after ${duration((this.#firstToken - this.#begun) / 1000)}`);
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      facts.push(`prompt of ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`);
    }
    const actions = make("span", "actions");
    this.foot.append(make("span", "facts", facts.join(" · ")), actions);
    if (this.#content) {
      const copy = button("Copy", async () => {
        await navigator.clipboard.writeText(this.#content).then(
          () => (copy.textContent = "Copied"),
          () => (copy.textContent = "Cannot copy"),
        );
        setTimeout(() => (copy.textContent = "Copy"), 1500);
      });
      actions.append(copy);
    }
    this.again = make("span", "again");
    this.again.append(button("Retry", retry));
    if (edit) this.again.append(button("Edit question", edit));
    actions.append(this.again);
  }

  /** The conversation goes on: this answer cannot be asked for again. */
  settle() {
    this.again?.remove();
  }

  /** Say that the answer failed. */
  fail(error) {
    const box = make("div", "failure");
    box.setAttribute("role", "alert");
    box.append(make("strong", "", error.status ? `Error ${error.status}` : "Error"), make("p", "", error.message));
    this.foot.before(box);
  }

  /** Ask for the results of the calls; `send` gets the messages that carry them. */
  askResults(send) {
    const form = make("form", "results");
    const fields = this.#calls.filter(Boolean).map((call) => {
      const label = make("label", "", `Result of ${call.function.name}`);
      const field = make("textarea", "code");
      field.rows = 2;
      label.append(field);
      form.append(label);
      return { role: "tool", tool_call_id: call.id, field };
    });
    const submit = make("button", "primary", fields.length > 1 ? "Send results" : "Send result");
    submit.type = "submit";
    form.append(submit);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.replaceWith(...fields.map(({ field }) => codeBlock(field.value, "result")));
      send(fields.map(({ field, ...message }) => ({ ...message, content: field.value })));
    });
    this.foot.before(form);
    this.results = form;
  }
}

function callView(call) {
  const view = make("section", "call");
  const title = make("h3", "", "Calls ");
  title.append(make("code", "", call.function.name));
  view.append(title);
  let values = null;
  try {
    values = JSON.parse(call.function.arguments);
  } catch {
    // not complete yet, or no JSON: shown as it is
  }
  if (values === null || typeof values !== "object" || Array.isArray(values)) {
    if (call.function.arguments) view.append(make("pre", "arguments", call.function.arguments));
    return view;
  }
  const list = make("dl", "arguments");
  for (const [name, value] of Object.entries(values)) {
    list.append(make("dt", "", name), make("dd", "", shown(value)));
  }
  if (!list.children.length) view.append(make("p", "hint", "without arguments"));
  else view.append(list);
  return view;
}

function shown(value) {
  if (typeof value === "string") return value;
  const line = JSON.stringify(value);
  return line.length > 60 ? JSON.stringify(value, null, 2) : line;
}

function thought(seconds) {
  return seconds < 0.5 ? "Thought briefly" : `Thought for ${duration(seconds)}`;
}

function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 100) / 100} s`;
  if (seconds < 10) return `${number.format(seconds)} s`;
  const whole = Math.round(seconds);
  return whole < 60 ? `${whole} s` : `${Math.floor(whole / 60)} min ${whole % 60} s`;
}
