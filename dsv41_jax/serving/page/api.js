// Requests to the server, and its streams of events.

/** An answer with an error, or none at all. `status` is 0 where the server was not reached. */
export class ApiFailure extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Server-sent events out of text that is cut anywhere: `push` gives the data of the events that are complete. */
export class EventReader {
  #rest = "";
  #data = [];

  push(text) {
    const events = [];
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    for (let line of lines) {
      if (line.endsWith("\r")) line = line.slice(0, -1);
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      } // comments and other fields say nothing here
    }
    return events;
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function failure(response) {
  let message = "";
  const text = await response.text().catch(() => "");
  try {
    message = JSON.parse(text).error.message;
  } catch {
    message = text.length < 300 && !text.trimStart().startsWith("<") ? text : "";
  }
  const wait = response.headers.get("Retry-After");
  message = message || response.statusText || "The server refused the request.";
  return new ApiFailure(wait ? `${message} (try again in ${wait} s)` : message, response.status);
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure("The server cannot be reached.", 0);
  }
  if (!response.ok) throw await failure(response);
  return response;
}

export async function getJson(path, key, signal) {
  return (await request(path, { headers: headers(key), signal, cache: "no-store" })).json();
}

/** Chunks of a chat completion, as they come. Throws ApiFailure, or AbortError where `signal` says so. */
export async function* chatChunks(body, key, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const events = new EventReader();
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (signal.aborted) throw new DOMException("stopped", "AbortError");
        throw new ApiFailure(`The connection broke: ${error.message}`, 0);
      }
      for (const data of events.push(part.done ? "\n\n" : decoder.decode(part.value, { stream: true }))) {
        if (data === "[DONE]") return;
        let chunk;
        try {
          chunk = JSON.parse(data);
        } catch {
          throw new ApiFailure("The server sent something that cannot be read.", 0);
        }
        if (chunk.error) throw new ApiFailure(chunk.error.message ?? "The answer failed.", 0);
        yield chunk;
      }
      if (part.done) throw new ApiFailure("The connection ended before the answer did.", 0);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
