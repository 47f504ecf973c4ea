// The live strip: a look at the engine once a second, while the page can be seen.

import { getJson } from "./api.js";

const PERIOD_MS = 1000;
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 1024 && unit < units.length - 1; unit += 1) count /= 1024;
  return `${count < 10 && unit ? short.format(count) : whole.format(count)} ${units[unit]}`;
}

/** Ask for the state with the key that `getKey` gives, until the page is closed. */
export function startStrip(getKey) {
  const strip = document.getElementById("strip");
  const put = (name, text) => (document.getElementById(`strip-${name}`).textContent = text);
  let timer = 0;
  let last = null; // the counter and when it was read

  function show(state, now) {
    let rate = "–";
    if (last && state.completion_tokens >= last.tokens) {
      const seconds = (now - last.at) / 1000;
      const perSecond = (state.completion_tokens - last.tokens) / seconds;
      rate = perSecond < 10 ? short.format(perSecond) : whole.format(perSecond);
    }
    last = { tokens: state.completion_tokens, at: now };
    const used = state.pages - state.free_pages;
    put("rate", rate);
    put("running", `${state.reading + state.writing} / ${state.rows}`);
    put("waiting", whole.format(state.waiting));
    put("cached", compact.format(state.cached_tokens));
    put("pages", `${whole.format(used)} / ${whole.format(state.pages)}`);
    put("hbm", bytes(state.hbm_bytes));
    put("persistent", bytes(state.persistent_bytes));
    document.getElementById("strip-pages-bar").value = state.pages ? used / state.pages : 0;
  }

  async function poll() {
    timer = 0;
    if (document.hidden) return;
    try {
      show(await getJson("state", getKey()), performance.now());
      strip.classList.remove("stale");
      strip.removeAttribute("title");
    } catch (error) {
      last = null;
      put("rate", "–");
      strip.classList.add("stale");
      strip.title = error.status === 401 ? "The server asks for an API key: see Settings." : error.message;
    }
    if (!document.hidden && !timer) timer = setTimeout(poll, PERIOD_MS);
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    timer = 0;
    last = null; // a rate over the pause would mean little
    if (!document.hidden) poll();
  });
  poll();
}
