// Images that go with the next message: chosen, dropped or pasted; shown small, and taken away again.

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];

export class Pictures {
  #images = []; // {name, url}
  #allowed = () => true;
  #changed;
  #notify;

  /** `allowed`: whether the model takes images. `changed`: called when there are more or fewer. `notify`: for words. */
  constructor({ allowed, changed, notify }) {
    this.#allowed = allowed;
    this.#changed = changed;
    this.#notify = notify;
    this.list = document.getElementById("thumbnails");
    const drop = document.getElementById("drop");
    const input = document.getElementById("files");
    document.getElementById("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      this.add([...input.files]);
      input.value = "";
    });
    document.getElementById("prompt").addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    });
    const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
    document.addEventListener("dragover", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      drop.hidden = false;
    });
    document.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) drop.hidden = true;
    });
    document.addEventListener("drop", (event) => {
      drop.hidden = true;
      if (!holdsFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  get count() {
    return this.#images.length;
  }

  /** Take all images out. */
  take() {
    const images = this.#images;
    this.#images = [];
    this.#show();
    return images;
  }

  /** Put images back. */
  put(images) {
    this.#images.push(...images);
    this.#show();
  }

  async add(files) {
    if (!this.#allowed()) {
      this.#notify("This model takes no images.");
      return;
    }
    const others = files.filter((file) => !KINDS.includes(file.type));
    if (others.length) this.#notify(`Not an image that can be read: ${others.map((file) => file.name).join(", ")}`);
    for (const file of files.filter((file) => KINDS.includes(file.type))) {
      try {
        this.#images.push({ name: file.name || "pasted image", url: await dataUrl(file) });
      } catch {
        this.#notify(`${file.name} cannot be read.`);
      }
    }
    this.#show();
  }

  #show() {
    this.list.replaceChildren(
      ...this.#images.map((image) => {
        const item = document.createElement("li");
        const picture = document.createElement("img");
        picture.src = image.url;
        picture.alt = image.name;
        picture.title = image.name;
        const remove = document.createElement("button");
        remove.type = "button";
        remove.textContent = "×";
        remove.setAttribute("aria-label", `Remove ${image.name}`);
        remove.addEventListener("click", () => {
          this.#images = this.#images.filter((other) => other !== image);
          this.#show();
          document.getElementById("prompt").focus();
        });
        item.append(picture, remove);
        return item;
      }),
    );
    this.list.hidden = !this.#images.length;
    this.#changed();
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
