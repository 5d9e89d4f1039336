// The interactive example of why.md: sliders for a target p and a draft q, and what the acceptance rule emits.

// Acceptance rate, residual and emitted distribution of one draft token.
function acceptance(p, q) {
  const overlap = p.map((value, token) => Math.min(value, q[token]));
  const excess = p.map((value, token) => Math.max(value - q[token], 0));
  const rate = sum(overlap);
  const left = sum(excess);
  const residual = excess.map((value) => (left > 0 ? value / left : 0));
  return { rate, residual, emitted: overlap.map((value, token) => value + (1 - rate) * residual[token]) };
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function distribution(weights) {
  const total = sum(weights);
  return weights.map((weight) => (total > 0 ? weight / total : 1 / weights.length));
}

function build(place) {
  const tokens = ["sea", "wind", "boat", "sail"];
  const start = { p: [50, 30, 15, 5], q: [20, 60, 10, 10] };
  const sliders = { p: [], q: [] };
  const table = place.appendChild(document.createElement("table"));
  const head = ["token", "target p", "draft q", "residual", "emitted"].map((name) => `<th scope="col">${name}</th>`);
  table.innerHTML = `<thead><tr>${head.join("")}</tr></thead>`;
  const body = table.createTBody();
  const cells = tokens.map((token, index) => {
    const row = body.insertRow();
    row.innerHTML = `<th scope="row">${token}</th>`;
    for (const name of ["p", "q"]) {
      const slider = document.createElement("input");
      Object.assign(slider, { type: "range", min: 0, max: 100, value: start[name][index] });
      slider.setAttribute("aria-label", `${name === "p" ? "target" : "draft"} weight of ${token}`);
      slider.addEventListener("input", show);
      const cell = row.insertCell();
      cell.append(slider, document.createElement("output"));
      sliders[name].push(slider);
    }
    return { p: row.cells[1].lastChild, q: row.cells[2].lastChild, residual: row.insertCell(), emitted: row.insertCell() };
  });
  const summary = place.appendChild(document.createElement("p"));
  summary.setAttribute("aria-live", "polite");

  function show() {
    const p = distribution(sliders.p.map((slider) => Number(slider.value)));
    const q = distribution(sliders.q.map((slider) => Number(slider.value)));
    const { rate, residual, emitted } = acceptance(p, q);
    cells.forEach((cell, token) => {
      cell.p.textContent = p[token].toFixed(3);
      cell.q.textContent = q[token].toFixed(3);
      cell.residual.textContent = residual[token].toFixed(3);
      cell.emitted.innerHTML = `<span style="width:${100 * emitted[token]}%"></span>${emitted[token].toFixed(3)}`;
    });
    const gap = Math.max(...emitted.map((value, token) => Math.abs(value - p[token])));
    summary.textContent =
      `Accepted with probability ${rate.toFixed(3)}. ` +
      `Emitted and target distribution differ by at most ${gap < 1e-9 ? "0" : gap.toExponential(1)}.`;
  }
  show();
}

if (typeof module !== "undefined") {
  module.exports = { acceptance, distribution };
} else {
  const place = document.getElementById("acceptance");
  if (place) build(place);
}
