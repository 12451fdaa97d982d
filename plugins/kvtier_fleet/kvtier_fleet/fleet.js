// What `page.html` of kvtier_serve shows of a fleet.
const asked = ["status"];
const sum = (all, of) => all.reduce((total, each) => total + of(each), 0);
function row(name, several) {
  const memory = several.flatMap(s => s.memory), spaces = several.flatMap(s => s.namespaces);
  const all = sum(memory, m => m.nbytes), lent = all - sum(memory, m => m.free), lookups = sum(spaces, s => s.asked);
  const works = spaces.every(s => s.tiers.every(t => t.can_read && t.can_write));
  return [escaped(name), sum(several, s => s.sessions), new Set(spaces.map(s => s.model)).size, bar(all ? lent / all : 0), size(lent), size(all),
    lookups ? `${(100 * sum(spaces, s => s.found) / lookups).toFixed(1)} %` : "", works ? "works" : "rests"];
}
function show(now) {
  const servers = Object.entries(now.servers), silent = Object.values(now.silent);
  document.getElementById("about").textContent = `${servers.length} of ${servers.length + silent.length} servers answer`;
  const rows = servers.map(([name, each]) => row(name, [each]));
  let page = "<h2>Servers</h2>" + table(["server", "engines", "models", "", "memory", "of", "chunks found", "tiers"],
    [...rows, row("all", servers.map(([, each]) => each))]);
  if (silent.length) page += "<h2>No answer</h2>" + silent.map(why => `<p class="bad">${escaped(why)}</p>`).join("");
  document.getElementById("main").innerHTML = page;
}
