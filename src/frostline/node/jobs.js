// Shared by the pages: what jobs say of themselves, and what they saved. All of it is made of elements and of texts.
const JOBS = 24, HIGH = 110, TOP = 24, LEFT = 84, RIGHT = 384, WIDE = 484;
const signed = value => value < 0 ? `−${bytes(-value)}` : bytes(value);
const duration = value => value < 0 ? `−${duration(-value)}` : value < 60 ? `${three(value)} s` : seconds(value);
const job_key = job => `${job.tenant}/${job.job}`;

// The first line, and a card for each job.
function show_jobs(view) {
  const told = view.jobs.filter(job => job.activity), has_saved = view.saved.bytes !== 0;
  at("jobs_seen").hidden = !told.length && !has_saved;
  if (!at("saved_bytes")) make_saved();
  const currency = view.prices ? view.prices.currency : "";
  show("saved_bytes", view.saved.bytes, signed);
  show("saved_s", view.saved.seconds === null ? NaN : view.saved.seconds, duration);
  show("saved_money", view.saved.money === null ? NaN : view.saved.money, value => `${value.toFixed(2)} ${currency}`);
  at("saved_money").closest("div").hidden = view.saved.money === null;
  const cards = new Map([...at("jobs_said").children].map(card => [card.dataset.name, card]));
  const several = new Set(told.map(job => job.tenant)).size > 1;
  at("jobs_said").replaceChildren(...told.slice(0, JOBS).map(job => {
    const card = cards.get(job_key(job)) || make_card(job);
    show_card(card, job, several);
    return card;
  }));
  at("jobs_more").hidden = told.length <= JOBS;
  at("jobs_more").textContent = `The first ${JOBS} of ${whole(told.length)} jobs.`;
}
function make_saved() {
  const section = at("jobs_seen"), list = document.createElement("dl");
  make("h2", "Saved by jobs", section).id = "saved_title";
  list.setAttribute("aria-labelledby", "saved_title");
  section.append(list);
  for (const [id, words] of [["saved_bytes", "did not cross the network"], ["saved_s", "of the link, at its measured bandwidth"], ["saved_money", "by the prices that were given"]]) {
    const pair = make("div", "", list);
    make("dt", words, pair);
    make("data", "–", make("dd", "", pair)).id = id;
  }
  make("h2", "Jobs at work", section);
  make("div", "", section).id = "jobs_said";
  const more = make("p", "", section);
  more.id = "jobs_more";
  more.className = "caption";
}
function make_card(job) {
  const card = document.createElement("article");
  card.className = "job";
  card.dataset.name = job_key(job);
  make("h3", job.job, card);
  const meter = make("div", "", card), line = make("p", "", meter), track = make("div", "", meter);
  meter.className = "meter";
  make("span", "", line).className = "epoch";
  make("data", "", line).className = "taken";
  track.className = "track";
  for (const [name, value] of [["role", "progressbar"], ["aria-label", `Progress of ${job.job}`], ["aria-valuemin", "0"], ["aria-valuemax", "100"]]) track.setAttribute(name, value);
  make("i", "", track);
  for (const name of ["rates", "crossed", "failed", "cause", "where"]) make("p", "", card).className = name;
  return card;
}
function show_card(card, job, several) {
  const said = job.activity, find = name => card.querySelector(`.${name}`), share = said.epoch_samples ? said.taken / said.epoch_samples : NaN;
  const done = said.epoch_samples ? `${whole(said.taken)} of ${whole(said.epoch_samples)} samples` : "no pass yet";
  card.querySelector("h3").textContent = several ? `${job.job} of ${job.tenant}` : job.job;
  find("epoch").textContent = `epoch ${said.epoch}`;
  find("taken").value = said.taken;
  find("taken").textContent = done;
  fill(find("track"), share, done);
  put_figures(find("rates"), [["samples_per_s", said.samples_per_s, rate, " samples/s"], ["stall_share", said.stall_share, percent, " of the time waiting"], ["processes", said.processes, whole, said.processes === 1 ? " process" : " processes"]]);
  put_figures(find("crossed"), [["samples", said.samples, whole, " samples in all"], ["wire_bytes", said.wire_bytes, bytes, " crossed"], ["saved", said.saved.bytes, signed, " saved"]]);
  show_failures(find("failed"), said);
  find("cause").textContent = said.bottleneck ? said.bottleneck.says : "";
  show_plan(card, job);
}
// Requests that were made again, and which of several nodes failed them; nothing where none did.
function show_failures(line, said) {
  put_figures(line, said.retries ? [["retries", said.retries, whole, said.retries === 1 ? " request made again" : " requests made again"]] : []);
  for (const node of said.nodes) {
    const counts = [[node.failures, "failed"], [node.retries, "taken over from others"]].filter(([count]) => count);
    const words = [...counts.map(([count, what]) => `${whole(count)} ${what}`), ...(node.trouble ? [`in trouble: ${node.trouble}`] : [])];
    line.append(`${line.childNodes.length ? " · " : ""}${node.node}: ${words.join(", ")}`);
  }
}
function put_figures(line, figures) {
  line.replaceChildren();
  figures.forEach(([name, value, say, words], place) => {
    if (place) line.append(" · ");
    const made = make("data", say(value), line);
    made.className = `job_${name}`;
    made.value = value;
    line.append(words);
  });
}

// The network from the encoded sample to the frost line: bars as high as a sample's bytes, and where most samples cross.
function show_plan(card, job) {
  const plan = job.activity.plan, whole_plan = JSON.stringify(plan);
  if (!plan || card.dataset.plan === whole_plan) return;
  card.dataset.plan = whole_plan;
  const before = card.querySelector(".plan"), words = words_of(plan);
  if (before) before.remove();
  card.querySelector(".where").textContent = words;
  card.insertBefore(plan_drawn(plan, `The plan of ${job.job} along its network`, words), card.querySelector(".where"));
}
function words_of(plan) {
  const last = plan.names.length - 1, place = number => `${plan.names[number]} (${bytes(plan.nbytes[number])})`;
  const crosses = `cut after ${place(plan.cut)} as ${plan.codec}`;
  return `${plan.names.length} places from ${place(0)} to ${place(last)} a sample; ${crosses}: the store side works up to there, and the trainer does the rest.`;
}
function plan_drawn(plan, title, words) {
  const svg = drawn("svg", {class: "plan", viewBox: `0 0 ${WIDE} ${TOP + HIGH + 4}`, role: "img"}), most = Math.max(1, ...plan.nbytes);
  const name = `plan_${plan_drawn.count = (plan_drawn.count || 0) + 1}`;
  drawn("title", {id: `${name}_title`}, svg).textContent = title;
  drawn("desc", {id: `${name}_words`}, svg).textContent = words;
  svg.setAttribute("aria-labelledby", `${name}_title`);
  svg.setAttribute("aria-describedby", `${name}_words`);
  // On both sides there is room for a name, wherever the cut is.
  const step = (RIGHT - LEFT) / plan.names.length, cut = LEFT + (plan.cut + 1) * step;
  plan.names.forEach((block, place) => {
    const high = Math.max(1, HIGH * plan.nbytes[place] / most), side = place <= plan.cut ? "store" : "trainer";
    const bar = drawn("rect", {class: side, x: (LEFT + place * step + step * .1).toFixed(2), y: (TOP + HIGH - high).toFixed(2), width: (step * .8).toFixed(2), height: high.toFixed(2)}, svg);
    drawn("title", {}, bar).textContent = `${block}: ${bytes(plan.nbytes[place])}`;
  });
  drawn("line", {x1: cut.toFixed(2), x2: cut.toFixed(2), y1: 4, y2: TOP + HIGH}, svg);
  drawn("text", {x: (cut - 6).toFixed(2), y: 15, "text-anchor": "end"}, svg).textContent = "store side";
  drawn("text", {x: (cut + 6).toFixed(2), y: 15}, svg).textContent = "trainer side";
  return svg;
}
function drawn(kind, attributes, parent) {
  const made = document.createElementNS(document.querySelector("svg").namespaceURI, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (parent) parent.append(made);
  return made;
}

// A node that serves no control plane is asked once.
let tells_jobs = true;
async function look_at_jobs() {
  if (!tells_jobs) return;
  const answer = await ask("v1/view");
  tells_jobs = answer.status !== 404;
  if (answer.ok) show_jobs(await answer.json());
}
