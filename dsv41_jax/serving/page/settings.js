// The settings panel. Everything is kept in this tab (sessionStorage), the API key too, and forgotten when it closes.

const FIELDS = ["temperature", "max-tokens", "system", "tools", "api-key", "effort", "effort-number"];

const field = (name) => document.getElementById(name);

function tools() {
  const text = field("tools").value.trim();
  if (!text) return undefined;
  const list = JSON.parse(text);
  if (!Array.isArray(list)) throw new SyntaxError("a list is needed: [{\"type\": \"function\", …}]");
  return list.length ? list : undefined;
}

/** `changed`: called when the panel is closed. */
export function setUpSettings(changed) {
  for (const name of FIELDS) {
    const kept = sessionStorage.getItem(`chat.${name}`);
    if (kept !== null) field(name).value = kept;
    field(name).addEventListener("change", () => sessionStorage.setItem(`chat.${name}`, field(name).value));
  }
  const showNumber = () => (field("effort-number").hidden = field("effort").value !== "number");
  field("effort").addEventListener("change", showNumber);
  showNumber();

  const dialog = field("settings");
  const error = field("tools-error");
  field("open-settings").addEventListener("click", () => dialog.showModal());
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.requestClose?.();
  });
  function check() {
    let message = "";
    try {
      tools();
    } catch (problem) {
      message = `The tools cannot be read: ${problem.message}`;
    }
    error.textContent = message;
    error.hidden = !message;
    return !message;
  }
  field("tools").addEventListener("input", check);
  field("settings-form").addEventListener("submit", (event) => {
    if (!check()) event.preventDefault();
  });
  dialog.addEventListener("close", changed);
}

export function apiKey() {
  return field("api-key").value.trim();
}

export function systemPrompt() {
  return field("system").value.trim();
}

/** Fields of a request. Throws SyntaxError where the tools are no JSON. */
export function requestOptions() {
  const options = { reasoning_effort: field("effort").value };
  if (options.reasoning_effort === "number") options.reasoning_effort = Number(field("effort-number").value);
  if (field("temperature").value !== "") options.temperature = Number(field("temperature").value);
  if (field("max-tokens").value !== "") options.max_tokens = Number(field("max-tokens").value);
  const given = tools();
  if (given) options.tools = given;
  return options;
}
