// Shared by the pages: what makes one, its texts, and asking every second. A page has WHO it asks, and look().
const PERIOD_MS = 1000;
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

async function ask(path) {
  const headers = token ? {Authorization: `Bearer ${token}`} : {};
  return await fetch(path, {headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(5000)});
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
