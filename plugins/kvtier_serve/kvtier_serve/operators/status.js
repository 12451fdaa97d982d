// What `page.html` shows of a server.
const asked = ["status", "tenants"];
const moved = (tier, kinds) => kinds.reduce((sum, kind) => sum + ((tier.events[kind] || {}).nbytes || 0), 0);
let before = null;
function speed(space, tier, now, kinds) {
  const old = before && before.namespaces.find(n => n.number === space.number);
  const then = old && old.tiers.find(t => t.tier === tier.tier);
  return then ? `${size((moved(tier, kinds) - moved(then, kinds)) / Math.max(now.at - before.at, .1))}/s` : "";
}
function show(now, tenants) {
  const all = now.memory.reduce((sum, m) => sum + m.nbytes, 0);
  document.getElementById("about").textContent =
    `${now.sessions} engine${now.sessions === 1 ? "" : "s"}, up ${Math.floor(now.uptime / 3600)} h ${Math.floor(now.uptime / 60) % 60} min`;
  let page = "<h2>Memory</h2>" + table(["arena", "", "lent to models", "of"],
    now.memory.map(m => [escaped(m.tier), bar(1 - m.free / m.nbytes), size(m.nbytes - m.free), size(m.nbytes)]));
  for (const space of now.namespaces) {
    page += `<h2>${escaped(space.model)}</h2><p>${space.engines} engine${space.engines === 1 ? "" : "s"}, ` +
      `${space.asked ? (100 * space.found / space.asked).toFixed(0) + " % of chunks found, " : ""}namespace ${space.namespace.slice(0, 12)}</p>`;
    page += table(["tier", "state", "", "holds", "of", "chunks", "in", "out", "in use"], space.tiers.map(t => [
      escaped(t.tier), t.can_read && t.can_write ? "works" : "rests", bar(t.capacity ? t.nbytes / t.capacity : 0), size(t.nbytes), t.capacity ? size(t.capacity) : "",
      t.chunks, speed(space, t, now, ["stored", "written", "promoted"]), speed(space, t, now, ["read"]), t.pins || size(t.inflight)]));
  }
  if (now.engines.length) page += "<h2>Engines</h2>" + table(["engine", "session", "workers", "holds", "state"], now.engines.map(e => [
    escaped(e.name), e.session, e.workers, e.holders, e.hung_up ? "rests" : "works"]));
  if (now.programs.length) page += "<h2>Programs</h2>" + table(["program", "process", "starts", "last end", "state"], now.programs.map(p => [
    escaped(p.name), p.process || "", p.starts, escaped(p.last_end), p.process ? "works" : "rests"]));
  if (tenants.some(t => t.tenant !== "anonymous")) page += "<h2>Tenants</h2>" + table(["tenant", "", "holds", "soft quota", "hard quota"],
    tenants.sort((a, b) => b.nbytes - a.nbytes).slice(0, 12).map(t => [escaped(t.tenant),
      bar(t.nbytes / all), size(t.nbytes), t.soft === null ? "" : size(t.soft), t.hard === null ? "" : size(t.hard)]));
  if (tenants.length > 12) page += `<p>and ${tenants.length - 12} more with less</p>`;
  document.getElementById("main").innerHTML = page;
  before = now;
}
