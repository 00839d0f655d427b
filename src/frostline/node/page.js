// Shared by the pages: what makes one, its texts, and being sent figures. A page has WHO it asks, PATH, and take(now).
const PERIOD_MS = 1000, SILENCE_MS = 5000;
const seen = [];
let token = "";
const at = id => document.getElementById(id);

const whole = value => Math.round(value).toLocaleString("en");
function three(value) { return value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2); }
function bytes(value) {
  let power = 0;
  while (value >= 999.5 && power < 5) { value /= 1000; power += 1; }
  return power ? `${three(value)} ${["B", "kB", "MB", "GB", "TB", "PB"][power]}` : `${value.toFixed(0)} B`;
}
function seconds(value) {
  const all = Math.floor(value), days = Math.floor(all / 86400), hours = Math.floor(all / 3600) % 24, minutes = Math.floor(all / 60) % 60;
  return days ? `${days} d ${hours} h` : hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${all % 60} s` : `${all} s`;
}
const percent = share => `${(100 * share).toFixed(1)} %`;
const rate = value => value >= 1000 ? whole(value) : String(+value.toPrecision(3));

function show(id, value, say) {
  const known = Number.isFinite(value);
  at(id).value = known ? value : "";
  at(id).textContent = known ? say(value) : "–";
}
function fill(track, share, words) {
  const bounded = Math.max(0, Math.min(1, Number.isFinite(share) ? share : 0));
  track.firstElementChild.style.width = `${100 * bounded}%`;
  track.setAttribute("aria-valuenow", (100 * bounded).toFixed(1));
  track.setAttribute("aria-valuetext", words);
}
function tell(words, isBad) {
  if (at("status").textContent !== words) at("status").textContent = words;
  at("status").className = isBad ? "bad" : "";
}
function make(kind, words, parent) {
  const made = document.createElement(kind);
  made.textContent = words;
  parent.append(made);
  return made;
}

// Rows stay the same elements, so that whoever has the focus in one keeps it.
function keep(parent, made) {
  const old = new Map([...parent.children].map(child => [child.dataset.name, child]));
  made.forEach((fresh, place) => {
    const mine = old.get(fresh.dataset.name), is_alike = mine && mine.querySelectorAll("button").length === fresh.querySelectorAll("button").length;
    const row = is_alike ? mine : fresh;
    if (is_alike) {
      old.delete(fresh.dataset.name);
      [...fresh.children].forEach((cell, number) => { said(row.children[number], said(cell)); });
    }
    if (parent.children[place] !== row) parent.insertBefore(row, parent.children[place] || null);
  });
  for (const row of old.values()) row.remove();
}
// The words of a cell, beside its button where it has one.
function said(cell, words) {
  const place = cell.querySelector("span") || cell;
  if (words !== undefined && place.textContent !== words) place.textContent = words;
  return place.textContent;
}
// Puts a button beside the words of a cell; what it opens is asked for when it is pressed.
function may_change(cell, what, open) {
  const words = cell.textContent;
  cell.replaceChildren();
  make("span", words, cell);
  add_button(cell, what, open);
}
function add_button(parent, what, open) {
  const button = make("button", "change", parent);
  button.className = "small";
  button.setAttribute("aria-label", `Change ${what}`);
  button.addEventListener("click", () => change(what, ...open()));
}
// A form over the page that sends what was changed in it; a field that is left empty is sent as null.
function change(what, path, fields, hint) {
  const box = make("dialog", "", document.body), form = make("form", "", box);
  box.setAttribute("aria-labelledby", "change_title");
  make("h2", `Change ${what}`, form).id = "change_title";
  for (const [name, label, value] of fields) {
    const line = make("div", "", form), words = make("label", label, line), input = make("input", "", line);
    input.id = words.htmlFor = `change_${name}`;
    input.name = name;
    input.defaultValue = value === null ? "" : String(value);
    input.autocomplete = "off";
  }
  make("p", hint, form).className = "caption";
  const problem = make("p", "", form), leave = make("button", "Leave as it is", form);
  problem.setAttribute("role", "alert");
  leave.type = "button";
  leave.addEventListener("click", () => box.close());
  make("button", "Change", form);
  form.addEventListener("submit", async event => {
    event.preventDefault();
    problem.textContent = "";
    const wrong = await send_change(path, [...form.querySelectorAll("input")].filter(input => input.value.trim() !== input.defaultValue));
    if (wrong) problem.textContent = wrong;
    else box.close();
  });
  box.addEventListener("close", () => box.remove());
  box.showModal();
}
async function send_change(path, inputs) {
  if (!inputs.length) return "";
  const value = words => words === "" ? null : Number.isFinite(Number(words)) ? Number(words) : words;
  try {
    const answer = await ask(path, Object.fromEntries(inputs.map(input => [input.name, value(input.value.trim())])));
    if (!answer.ok) return (await answer.json()).message;
  } catch {
    return `The ${WHO} does not answer; nothing is known of the change.`;
  }
  tell("Changed.", false);
  return "";
}

const who = () => token ? {Authorization: `Bearer ${token}`} : {};
const asking = {cache: "no-store", credentials: "omit"};
async function ask(path, body) {
  const sent = body === undefined ? {} : {method: "PATCH", body: JSON.stringify(body)};
  return await fetch(path, {...asking, ...sent, headers: who(), signal: AbortSignal.timeout(SILENCE_MS)});
}
// The server sends figures each second; where it has too many viewers it gives them once, and is asked again.
async function look() {
  const leaving = new AbortController(), leave = () => leaving.abort(), hide = () => { if (document.hidden) leave(); };
  let late = setTimeout(leave, SILENCE_MS);
  document.addEventListener("visibilitychange", hide);
  try {
    const answer = await fetch(PATH, {...asking, headers: {...who(), Accept: "text/event-stream, application/json"}, signal: leaving.signal});
    if (answer.status === 401) return refused();
    if (!answer.ok) throw new Error(String(answer.status));
    if (!answer.headers.get("Content-Type").startsWith("text/event-stream")) {
      await take(await answer.json());
      tell("Read every second.", false);
      return true;
    }
    await follow(answer.body.pipeThrough(new TextDecoderStream()).getReader(), () => {
      clearTimeout(late);
      late = setTimeout(leave, SILENCE_MS);
    });
  } catch (error) {
    if (!document.hidden) throw error;
  } finally {
    clearTimeout(late);
    document.removeEventListener("visibilitychange", hide);
  }
  return true;
}
async function follow(reader, heard) {
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    heard();
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) await take(JSON.parse(event.slice("data: ".length)));
    if (events.length) tell("Live, every second.", false);
  }
}
// The browser itself writes an error to its console for every refused answer, so nothing is asked again without a token.
function want_token(words) {
  token = "";
  at("figures").hidden = true;
  at("ask").hidden = false;
  at("token").focus();
  tell(words, words !== NEEDED());
}
function refused() {
  want_token(token ? `The ${WHO} does not know this token.` : NEEDED());
  return false;
}
const NEEDED = () => `This ${WHO} has tenants: type the token of one of them.`;
async function watch() {
  let goes_on = true;
  try {
    if (!document.hidden) goes_on = await look();
  } catch {
    tell(`The ${WHO} does not answer; it is asked again every second.`, true);
  }
  if (goes_on) setTimeout(watch, PERIOD_MS);
}
at("ask").addEventListener("submit", event => {
  event.preventDefault();
  token = at("token").value.trim();
  at("token").value = "";
  seen.length = 0;
  watch();
});
