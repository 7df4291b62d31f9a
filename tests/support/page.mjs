// The views of the dashboard under Node, without a browser: `node page.mjs STATIC URL COOKIE VIEW [QUERY]` draws a view of
// a dashboard that serves, and prints its texts as JSON: [class or tag, text] of each element that has text of its own.
// The document below knows what the views use and no more; a view that uses another property fails here.
const [folder, url, cookie, view, query = ""] = process.argv.slice(2);

class Element extends EventTarget {
  constructor(tag) { super(); Object.assign(this, { tag, attributes: {}, childNodes: [], dataset: {}, scrollTop: 0 }); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...nodes) { this.childNodes.push(...nodes); }
  replaceChildren(...nodes) { this.childNodes = nodes; }
  get children() { return this.childNodes.filter((node) => node instanceof Element); }
  get childElementCount() { return this.children.length; }
  get firstChild() { return this.childNodes[0] ?? null; }
  get textContent() { return this.childNodes.map((node) => (node instanceof Element ? node.textContent : String(node))).join(""); }
  set textContent(text) { this.childNodes = [text]; }
  get all() { return this.children.flatMap((node) => [node, ...node.all]); }
  querySelectorAll(selector) {
    return this.all.filter((node) => (selector.startsWith(".") ? (node.attributes.class ?? "").split(" ").includes(selector.slice(1)) : node.tag === selector));
  }
  querySelector(selector) { return this.querySelectorAll(selector)[0] ?? null; }
}

globalThis.document = Object.assign(new EventTarget(), {
  createElement: (tag) => new Element(tag), createElementNS: (_, tag) => new Element(tag), activeElement: null,
});
const plain = globalThis.fetch;
globalThis.fetch = (path) => plain(new URL(path, url), { headers: { Cookie: cookie } });

const { show } = await import(`${folder}/${view}.js`);
const runs = await (await fetch("/api/runs")).json(), place = new Element("main");
await show(place, runs, { query: Object.fromEntries(new URLSearchParams(query)), go: () => {}, changed: true });
const own = (node) => node.childNodes.filter((child) => !(child instanceof Element)).map(String).join("");
console.log(JSON.stringify(place.all.filter(own).map((node) => [node.attributes.class ?? node.tag, own(node)])));
