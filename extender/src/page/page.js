// The page of the extender. Every text of the cluster becomes a text node or an attribute, never markup.

/** The states of a GPU by letter: name, mark. */
const STATES = {
  f: ["free", "·"], h: ["held", "■"], p: ["partly held", "◧"], r: ["reserved", "~"],
  l: ["leaving", "!"], c: ["cordoned", "/"], u: ["unhealthy", "✕"],
};
const LETTERS = { free: "f", held: "h", partlyHeld: "p", reserved: "r", leaving: "l", cordoned: "c", unhealthy: "u" };
/** Rows of a domain that are shown at first, and by which it grows. */
const ROWS = 100;
/** Rows of the whole cluster up to which all domains are open at first. */
const OPEN = 150;
/** Shortest time between two fetches in milliseconds, and bytes that cost another second. */
const PAUSE = 1000;
const BYTES = 100_000;
/** Time after a fetch that failed. */
const RETRY = 5_000;
/** Time between fetches without a stream. */
const POLL = 15_000;
const SVG = "http://www.w3.org/2000/svg";

const by = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text. */
function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}
function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}
function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child !== undefined && child !== null));
  return element;
}

/** A link to something of the cluster. Its key finds it again after a redraw. */
function linkTo(kind, parts, text) {
  const hash = `#${kind}/${parts.map(encodeURIComponent).join("/")}`;
  return make("a", { href: hash, "data-key": hash }, text);
}
const nodeLink = (name) => linkTo("node", [name], name);
const podLink = (namespace, name) => linkTo("pod", [namespace, name], `${namespace}/${name}`);
const gangLink = (namespace, name) => linkTo("gang", [namespace, name], `${namespace}/${name}`);

/** Draws, and puts the focus back on what had it. */
function keepingFocus(drawing) {
  const key = document.activeElement?.dataset?.key;
  drawing();
  if (key && document.activeElement?.dataset?.key !== key) focusOn(key);
}
function focusOn(key) {
  const found = document.querySelector(`[data-key="${CSS.escape(key)}"]`);
  found?.focus();
  return Boolean(found);
}

// The cluster.

let cluster = { domains: [], counts: {}, nodes: 0, gpus: 0 };
let drawn = false;
/** Of each domain: its elements, rows by key, and how many rows it shows. */
const domains = new Map();

const countsOf = (counts) =>
  Object.values(STATES).filter(([word]) => counts[word]).map(([word]) => `${counts[word]} ${word}`).join(", ");
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/** The GPUs of a row in words: GPU 0 to 3 held, 4 to 7 free. */
function inWords(letters) {
  const runs = [];
  [...letters].forEach((letter, index) => {
    const last = runs.at(-1);
    if (last?.letter === letter) last.to = index;
    else runs.push({ letter, from: index, to: index });
  });
  return `GPU ${runs.map(({ letter, from, to }) => `${from === to ? from : `${from} to ${to}`} ${STATES[letter]?.[0] ?? "unknown"}`).join(", ")}`;
}

function cell(letter) {
  return make("span", { class: `gpu ${letter in STATES ? letter : ""}` }, STATES[letter]?.[1] ?? "?");
}

function rowElement(row, names) {
  const item = make("li", {}, make("span", { class: "name" }, nodeLink(names[0]),
    names.length > 1 ? ` and ${names.length - 1} alike` : ""),
  row.gpus ? make("span", { class: "gpus", role: "img", "aria-label": inWords(row.gpus) }, [...row.gpus].map(cell))
    : make("span", { class: "faint" }, "no GPUs are known"),
  make("span", { class: "faint" }, [row.model, row.links].filter(Boolean).join(", ")));
  if (row.cordoned) item.append(make("strong", {}, "cordoned"));
  if (row.notReady) item.append(make("strong", {}, `plugin not ready: ${row.notReady}`));
  if (names.length > 1) {
    const list = make("span", { class: "alike", hidden: "" });
    const button = make("button", { type: "button", "aria-expanded": "false", "data-key": `alike ${names[0]}` }, "Names");
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") !== "true";
      button.setAttribute("aria-expanded", String(open));
      list.hidden = !open;
      if (open && !list.hasChildNodes()) list.append(...names.flatMap((name, index) => [index ? ", " : "", nodeLink(name)]));
    });
    item.append(button, list);
  }
  return item;
}

/** The rows of a domain that pass the filter, each with the names that do. */
function rowsOf(domain) {
  const text = by("name").value.trim().toLowerCase();
  const state = by("shown").value;
  const passes = (row) => state === "" || (state === "!"
    ? row.gpus.includes("u") || row.gpus.includes("c") || row.cordoned || row.notReady
    : row.gpus.includes(state));
  const rows = domain.rows.filter(passes).map((row) => ({
    row, names: text ? row.names.filter((name) => name.toLowerCase().includes(text)) : row.names,
  }));
  return rows.filter(({ names }) => names.length > 0);
}

function domainElement(name, isOpen) {
  const title = make("h3");
  const counts = make("span");
  const list = make("ul");
  const more = make("button", { type: "button", hidden: "", "data-key": `more ${name}` });
  const details = make("details", { "data-domain": name }, make("summary", { "data-key": `domain ${name}` }, title, " ", counts), list, more);
  details.open = isOpen;
  const known = { details, title, counts, list, more, rows: new Map(), limit: ROWS, isOpen };
  details.addEventListener("toggle", () => drawRows(name));
  more.addEventListener("click", () => {
    const next = known.list.children.length;
    known.limit += ROWS;
    drawRows(name);
    known.list.children[next]?.querySelector("a")?.focus();
  });
  return known;
}

function drawRows(name) {
  const known = domains.get(name);
  const domain = cluster.domains.find((domain) => domain.name === name);
  if (!known || !domain || !known.details.open) return;
  const rows = rowsOf(domain);
  const kept = new Map();
  for (const { row, names } of rows.slice(0, known.limit)) {
    const content = JSON.stringify([row, names]);
    const before = known.rows.get(names[0]);
    kept.set(names[0], before?.content === content ? before : { content, element: rowElement(row, names) });
  }
  known.rows = kept;
  const elements = [...kept.values()].map(({ element }) => element);
  const same = elements.length === known.list.children.length
    && elements.every((element, index) => element === known.list.children[index]);
  if (!same) known.list.replaceChildren(...elements);
  const rest = rows.length - elements.length;
  known.more.hidden = rest <= 0;
  known.more.textContent = `Show ${Math.min(rest, ROWS)} of ${rest} more rows`;
}

function drawCluster() {
  const { nodes, gpus, counts, omittedNodes } = cluster;
  by("totals").textContent = `${plural(nodes, "node")}, ${plural(gpus, "GPU")}${gpus ? `: ${countsOf(counts)}` : ""}`
    + (omittedNodes ? `. ${plural(omittedNodes, "node")} not shown` : "");
  const rows = cluster.domains.reduce((sum, domain) => sum + domain.rows.length, 0);
  const current = new Set(cluster.domains.map((domain) => domain.name));
  for (const [name, { details }] of domains) {
    if (!current.has(name)) {
      details.remove();
      domains.delete(name);
    }
  }
  let any = false;
  cluster.domains.forEach((domain, index) => {
    const isOpen = rows <= OPEN || cluster.domains.length === 1;
    if (!domains.has(domain.name)) domains.set(domain.name, domainElement(domain.name, isOpen));
    const known = domains.get(domain.name);
    known.title.textContent = domain.name || (cluster.domains.length === 1 ? "All nodes" : "Nodes without a domain");
    known.counts.textContent = `${plural(domain.nodes, "node")}, ${plural(domain.gpus, "GPU")}: ${countsOf(domain.counts)}`;
    const isShown = rowsOf(domain).length > 0;
    known.details.hidden = !isShown;
    any ||= isShown;
    if (by("domains").children[index] !== known.details) by("domains").insertBefore(known.details, by("domains").children[index] ?? null);
    drawRows(domain.name);
  });
  by("none").hidden = any || nodes === 0;
}

/** The announcement of a change, for screen readers. */
function announce(before, after) {
  const changes = Object.values(STATES).map(([word]) => word)
    .filter((word) => (before[word] ?? 0) !== (after[word] ?? 0))
    .map((word) => `${after[word] ?? 0} ${word}, before ${before[word] ?? 0}`);
  if (drawn && changes.length) by("changes").textContent = `GPUs: ${changes.join("; ")}`;
}

// The gangs.

function drawGangs({ gangs, omittedGangs }) {
  by("no-gangs").hidden = gangs.length > 0;
  by("gang-table").hidden = gangs.length === 0;
  by("more-gangs").hidden = !omittedGangs;
  by("more-gangs").textContent = `${plural(omittedGangs, "gang")} not shown`;
  by("gang-rows").replaceChildren(...gangs.map((gang) => make("tr", {},
    make("th", { scope: "row" }, gangLink(gang.namespace, gang.name)),
    make("td", {}, gang.phase), make("td", {}, gang.message),
    make("td", {}, `${gang.exist} of ${gang.min}`), make("td", {}, gang.position ? String(gang.position) : ""),
    make("td", {}, time(gang.waitingSince)), make("td", {}, gang.domain))));
}

function time(seconds) {
  if (!seconds) return "";
  const at = new Date(seconds * 1000);
  return make("time", { datetime: at.toISOString() }, at.toLocaleString());
}

// One node, gang or pod.

/** The key of what is shown, its address, and the last text of it. */
let detail = null;

async function openDetail() {
  const [kind, ...parts] = location.hash.slice(1).split("/");
  const views = { node: [1, "nodes", nodeDetail, "Node"], gang: [2, "gangs", gangDetail, "Gang"], pod: [2, "pods", podDetail, "Pod"] };
  const view = views[kind];
  if (!view || parts.length !== view[0]) {
    closeDetail();
    return;
  }
  const [, path, body, word] = view;
  let name;
  try {
    name = parts.map(decodeURIComponent).join("/");
  } catch {
    closeDetail();
    return;
  }
  detail = { key: location.hash, url: `api/v1/${path}/${parts.join("/")}`, body, text: null };
  by("detail-title").textContent = `${word} ${name}`;
  by("detail-body").replaceChildren(make("p", {}, "Loading"));
  by("detail").hidden = false;
  by("detail-title").focus();
  await refreshDetail();
}

function closeDetail() {
  const before = detail;
  detail = null;
  by("detail").hidden = true;
  by("detail-body").replaceChildren();
  if (before && location.hash === "" && !focusOn(before.key)) by("map").focus();
}

async function refreshDetail() {
  const shown = detail;
  if (!shown) return;
  let text;
  let content;
  try {
    const response = await fetch(shown.url);
    text = await response.text();
    content = () => (response.ok ? shown.body(JSON.parse(text)) : [make("p", { role: "alert" }, text.trim())]);
  } catch {
    text = "error";
    content = () => [make("p", { role: "alert" }, "The extender does not respond.")];
  }
  // The version alone is no change.
  const same = (text) => text.replace(/"version":"[^"]*"/, "");
  if (detail !== shown || (shown.text !== null && same(shown.text) === same(text))) return;
  shown.text = text;
  keepingFocus(() => by("detail-body").replaceChildren(...content()));
}

const terms = (pairs) => make("dl", {}, pairs.filter(([, value]) => value !== undefined && value !== "" && value !== null)
  .flatMap(([term, value]) => [make("dt", {}, term), make("dd", {}, value)]));

function table(caption, head, rows) {
  return make("div", { class: "wide" }, make("table", {}, make("caption", {}, caption),
    make("thead", {}, make("tr", {}, head.map((text) => make("th", { scope: "col" }, text)))),
    make("tbody", {}, rows.map(([first, ...rest]) => make("tr", {},
      make("th", { scope: "row" }, first), rest.map((value) => make("td", {}, value ?? "")))))));
}

const joined = (elements) => elements.flatMap((element, index) => (index ? [", ", element] : [element]));

function podOnGpu(pod) {
  const how = { granted: " (granted)", leaving: " (leaving)", held: "" }[pod.hold] ?? "";
  return make("span", {}, podLink(pod.namespace, pod.name), how,
    pod.gang ? [" of gang ", gangLink(pod.namespace, pod.gang)] : "");
}

function gangOf(text) {
  const [namespace, ...name] = text.split("/");
  return gangLink(namespace, name.join("/"));
}

function nodeDetail(node) {
  const numaOf = (gpu) => node.numa.find(({ gpus }) => gpus.includes(gpu))?.name ?? "";
  const rows = node.gpus.map((gpu, index) => [String(index),
    make("span", {}, cell(LETTERS[gpu.state]), ` ${STATES[LETTERS[gpu.state]]?.[0] ?? gpu.state}`), numaOf(index),
    make("span", {}, joined((gpu.pods ?? []).map(podOnGpu)), gpu.leaving ? " a deleted pod" : ""),
    gpu.reservedFor ? gangOf(gpu.reservedFor) : "", [gpu.unhealthy, gpu.cordoned].filter(Boolean).join("; ")]);
  return [
    terms([["Domain", node.domain], ["GPUs", `${node.gpus.length}, ${node.model}`], ["Best link", node.links],
      ["NICs", node.nics.map((nic) => nic.name).join(", ")],
      ["Plugin", node.notReady ? `not ready: ${node.notReady}` : "ready"], ["Scheduling", node.cordoned ? "cordoned" : ""]]),
    graph(node),
    table("GPUs and their holders", ["GPU", "State", "NUMA", "Pods", "Reserved for", "Fault or cordon"], rows),
    node.omittedPods ? make("p", {}, `${plural(node.omittedPods, "pod")} not shown`) : "",
    make("details", {}, make("summary", { "data-key": "matrix" }, "Links of all pairs as a table"), matrix(node)),
  ];
}

function matrix(node) {
  const link = (a, b) => {
    const pair = node.pairs.find((pair) => pair.a === Math.min(a, b) && pair.b === Math.max(a, b));
    return pair ? `${pair.link} ${pair.gbs}` : "X";
  };
  const indexes = node.gpus.map((_, index) => index);
  return table("Link and GB/s in one direction", ["", ...indexes.map((index) => `GPU ${index}`)],
    indexes.map((a) => [`GPU ${a}`, ...indexes.map((b) => link(a, b))]));
}

/** How a link is drawn. */
function linkLook(link) {
  if (link.startsWith("NV")) return "nv";
  return link === "PIX" || link === "PXB" ? "near" : "far";
}

/** The GPUs on a circle, and the links between them: NVLinks, and the nearest PCIe paths that there are. */
function graph(node) {
  const count = node.gpus.length;
  const pcie = ["PIX", "PXB", "PHB", "NODE", "SYS"].find((link) => node.pairs.some((pair) => pair.link === link));
  const hasNvlinks = node.pairs.some((pair) => pair.link.startsWith("NV"));
  const pairs = node.pairs.filter(({ link }) => link.startsWith("NV") || (link === pcie && !(hasNvlinks && link === "SYS")));
  const [width, height] = [560, 440];
  const at = (index) => {
    const angle = (2 * Math.PI * index) / count - Math.PI / 2;
    return [width / 2 + 165 * Math.cos(angle), height / 2 + 150 * Math.sin(angle)].map((value) => Math.round(value * 10) / 10);
  };
  const most = Math.max(1, ...pairs.map((pair) => pair.gbs));
  const lines = pairs.map(({ a, b, link, gbs }) => {
    const [[x1, y1], [x2, y2]] = [at(a), at(b)];
    const words = `GPU ${a} to GPU ${b}: ${link}, ${gbs} GB/s`;
    return draw("line", { x1, y1, x2, y2, class: linkLook(link), "stroke-width": 1 + (4 * gbs) / most }, draw("title", {}, words));
  });
  const rates = pairs.length > 16 ? [] : pairs.map(({ a, b, link, gbs }) => {
    const [[x1, y1], [x2, y2]] = [at(a), at(b)];
    return draw("text", { x: x1 + (x2 - x1) * 0.3, y: y1 + (y2 - y1) * 0.3, class: "rate" }, `${link} ${gbs}`);
  });
  const circles = node.gpus.map((gpu, index) => {
    const [x, y] = at(index);
    const letter = LETTERS[gpu.state];
    const holder = gpu.pods?.[0]?.name ?? gpu.reservedFor ?? "";
    const short = holder.length > 20 ? `${holder.slice(0, 19)}…` : holder;
    return draw("g", { class: letter }, draw("circle", { cx: x, cy: y, r: 20 }),
      draw("text", { x, y: y + 5, class: "mark" }, `${index} ${STATES[letter]?.[1] ?? ""}`),
      draw("text", { x: x + (x - width / 2) * 0.26, y: y + 5 + (y - height / 2) * 0.26 }, short));
  });
  const groups = new Map();
  for (const { link, gbs } of pairs) groups.set(`${link}, ${gbs} GB/s`, (groups.get(`${link}, ${gbs} GB/s`) ?? 0) + 1);
  const legend = [...groups].map(([text, pairs]) => `${text}: ${plural(pairs, "pair")}`).join("; ");
  const words = count < 2 ? "One GPU" : `Links between ${count} GPUs. ${legend}`;
  return make("figure", {}, draw("svg", { class: "graph", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words }, lines, rates, circles),
    make("figcaption", {}, `${words}. Thick lines are fast; solid lines are NVLinks, dashed ones PCIe.`));
}

function gangDetail(gang) {
  const podOf = (uid) => gang.members.find((member) => member.uid === uid)?.name;
  return [
    terms([["Phase", gang.phase], ["Why", gang.message], ["Last refusal", gang.refused], ["Members", `${gang.exist} of ${gang.min}`],
      ["Priority", String(gang.priority)], ["Position in the queue", gang.position ? String(gang.position) : ""],
      ["Waits since", time(gang.waitingSince)], ["Domain", gang.domain], ["Integration", gang.integration],
      ["Backfill reservation", gang.hasBackfillReservation ? "yes" : ""]]),
    gang.compared.length ? table("Why there", ["Level", "Chosen", "Result", "Next best"], gang.compared.map((compared) => [
      compared.level, compared.domain, compared.result, compared.others.join("; ")])) : "",
    table("Members", ["Pod", "Stage", "Rank", "Role", "Node"], gang.members.map((member) => [podLink(gang.namespace, member.name),
      member.stage, member.rank === null ? "" : String(member.rank), member.role, member.node ? nodeLink(member.node) : ""])),
    gang.omittedMembers ? make("p", {}, `${plural(gang.omittedMembers, "member")} not shown`) : "",
    gang.reservations.length ? table("Reservations", ["Node", "Devices", "Pod", "State"], gang.reservations.map((kept) => [
      nodeLink(kept.node), kept.words, podOf(kept.pod) ?? "", kept.spare ? (kept.lent_to ? `spare, lent to ${kept.lent_to.join(", ")}` : "spare") : kept.bound ? "bound" : kept.decided ? "decided" : "planned"])) : "",
  ];
}

function podDetail(pod) {
  const { bound, waits } = pod;
  const placement = bound?.placement;
  return [
    terms([["Asks for", pod.asks], ["Gang", pod.gang ? gangOf(pod.gang) : ""],
      ["Node", bound ? nodeLink(bound.node) : ""], ["Devices", bound?.words || bound?.devices.join(", ")],
      ["Waits", waits ? [waits.reason, waits.message].filter(Boolean).join(": ") : ""],
      ["Reserved on", waits?.reservedOn ? nodeLink(waits.reservedOn) : ""]]),
    placement ? make("div", {}, make("h3", {}, "Why there"), make("ul", {}, placement.devices.map((text) => make("li", {}, text)),
      placement.compared ? make("li", {}, placement.compared) : "", placement.gang ? make("li", {}, placement.gang) : ""),
    placement.values.length ? table("Next best nodes", ["Node", "Alike", "Why it lost", "GB/s there", "GB/s here"],
      placement.values.map(({ node, alike, loss }, index) => [nodeLink(node), String(alike),
        placement.others[index].slice(placement.others[index].indexOf(": ") + 2), String(loss.gbs ?? ""), String(loss.chosenGbs ?? "")])) : "") : "",
    bound?.unexplained ? make("p", {}, `The reason is not known: ${bound.unexplained}.`) : "",
  ];
}

// Fetching.

let version = null;
let isFetching = false;
let isDue = false;

function showState(state, message) {
  const text = message || { ready: "Live", cold: "The index is cold.", stale: "The API server does not respond.", standby: "This replica stands by." }[state] || state;
  if (by("state").textContent !== text) by("state").textContent = text;
  by("state").dataset.state = state;
}

/** Fetches what changed: one fetch at a time, the more bytes the less often. */
async function update() {
  if (isFetching) {
    isDue = true;
    return;
  }
  isFetching = true;
  let bytes = 0;
  let pause = PAUSE;
  try {
    const [clusterText, gangsText] = await Promise.all(["api/v1/cluster", "api/v1/gangs"].map(async (url) => {
      const response = await fetch(url);
      if (!response.ok) throw new Error(`${response.status}`);
      return response.text();
    }));
    bytes = clusterText.length + gangsText.length;
    const next = JSON.parse(clusterText);
    announce(cluster.counts, next.counts);
    cluster = next;
    version = next.version;
    keepingFocus(() => {
      drawCluster();
      drawGangs(JSON.parse(gangsText));
    });
    drawn = true;
    document.documentElement.dataset.version = version;
    showState(next.state, next.message);
    await refreshDetail();
  } catch (error) {
    showState("lost", `The extender does not respond (${error.message}). Trying again.`);
    isDue = true;
    pause = RETRY;
  }
  await new Promise((done) => setTimeout(done, pause * Math.max(1, bytes / BYTES)));
  isFetching = false;
  if (isDue) {
    isDue = false;
    update();
  }
}

let stream = null;

function connect() {
  if (stream || document.hidden) return;
  stream = new EventSource("events");
  stream.addEventListener("message", (event) => {
    if (JSON.parse(event.data).version !== version) update();
  });
  stream.addEventListener("error", () => {
    if (stream?.readyState !== EventSource.CLOSED) {
      showState("lost", "The connection is lost. Trying again.");
      version = null;
      return;
    }
    disconnect();
    update();
    setTimeout(connect, POLL);
  });
}

function disconnect() {
  stream?.close();
  stream = null;
}

for (const [letter, [word]] of Object.entries(STATES)) by("legend").append(make("li", {}, cell(letter), ` ${word}`));
by("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const [namespace, name] = by("pod").value.trim().split("/");
  if (name) location.hash = `#pod/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`;
  else if (namespace) location.hash = `#pod/default/${encodeURIComponent(namespace)}`;
});
by("filter").addEventListener("submit", (event) => event.preventDefault());
by("filter").addEventListener("input", drawCluster);
by("close").addEventListener("click", () => { location.hash = ""; });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && detail) location.hash = "";
});
window.addEventListener("hashchange", openDetail);
// A page in the background needs no stream.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) disconnect();
  else connect();
});
update();
connect();
openDetail();
