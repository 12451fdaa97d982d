// Runs the script of the page as a browser does that opens a link, until it shows something or has failed to.
//   node page.mjs LINK < PAGE
import { readFileSync } from "node:fs";

const link = process.argv[2];
const stored = new Map(), elements = { about: {}, main: {} };
globalThis.location = new URL(link);
globalThis.history = { replaceState: (state, title, path) => { location.href = new URL(path, link); } };
globalThis.sessionStorage = { getItem: key => stored.get(key) ?? null, setItem: (key, value) => stored.set(key, value) };
globalThis.addEventListener = () => {};
globalThis.document = { getElementById: id => elements[id] };
const { fetch: fetched, setTimeout: later } = globalThis;
const say = () => console.log(JSON.stringify({ ...elements.about, ...elements.main, address: location.href }));
globalThis.setTimeout = (work, ...more) => (work.name === "look" ? say() : later(work, ...more));
globalThis.fetch = (path, options) => fetched(new URL(path, link), options);
(0, eval)(readFileSync(0, "utf-8").match(/<script>(.*)<\/script>/s)[1]);
