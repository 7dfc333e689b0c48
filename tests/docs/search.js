// Searches as a page that is opened as a file does: node search.js SHIM WORKER prints where "shard" is found.
const fs = require("fs");
const vm = require("vm");
const [shim, worker] = process.argv.slice(2).map((path) => fs.readFileSync(path, "utf8"));

function windowOf() {
  const events = new EventTarget();
  const own = { MessageEvent, EventTarget, console, setTimeout, queueMicrotask };
  for (const name of ["addEventListener", "dispatchEvent"]) own[name] = events[name].bind(events);
  own.self = own.window = own;
  own.document = {
    open() {}, write() {}, close() {},
    body: { append(child) { if (child.src) { vm.runInContext(worker, own); child.onload(); } } },
    createElement: (kind) => (kind === "iframe" ? { contentWindow: windowOf() } : {}),
  };
  return vm.createContext(own);
}

const page = windowOf();
page.location = { protocol: "file:" };
vm.runInContext(shim, page);
const search = new page.Worker("the worker");
const docs = [["other.html", "Other", "Nothing"], ["sharding.html", "Sharding", "Each rank has a shard"]];
search.addEventListener("message", ({ data }) => {
  if (data.type === 1) search.postMessage({ type: 2, data: "shard" });
  if (data.type === 3) console.log(data.data.items.flat().map((found) => found.location).join());
});
search.postMessage({ type: 0, data: {
  config: { lang: ["en"], separator: "[\\s\\-]+", pipeline: ["stemmer"], fields: { title: { boost: 1000 }, text: { boost: 1 }, tags: { boost: 1000000 } } },
  docs: docs.map(([location, title, text]) => ({ location, title, text })),
  options: { suggest: false },
} });
