"use strict";
(() => {
  const all = (query, root = document) => [...root.querySelectorAll(query)];
  const sign = (text) => text.replace("-", "−");
  const short = (v) => typeof v !== "number" ? String(v ?? "–")
    : sign(v.toFixed(Math.abs(v) >= 100 ? 0 : Math.abs(v) >= 10 ? 1 : Math.abs(v) >= 0.1 || v === 0 ? 2 : 3));

  // ---- sort a table by a column; what has no number stays at the end
  for (const table of all("table.methods")) {
    const heads = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const next = now === "none" ? head.dataset.first : now === "ascending" ? "descending" : "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", other === head ? next : "none"));
      const way = next === "ascending" ? 1 : -1;
      const value = (row) => row.cells[column].dataset.v;
      const compare = (a, b) => column === 0 ? a.localeCompare(b) : Number(a) - Number(b);
      [...body.rows]
        .sort((a, b) => (value(a) === "") - (value(b) === "") || way * compare(value(a), value(b)))
        .forEach((row) => body.append(row));
    }));
  }

  // ---- read a line chart at the pointer
  for (const svg of all(".chart:has(+ .key) svg:not(.trace)")) filter(svg);

  function filter(svg) { // names bring out their lines: while pointed at, or from one click to the next
    const figure = svg.closest("figure");
    all(".key li:has(button)", figure).forEach((item) => {
      const colour = [...item.querySelector(".swatch").classList].find((name) => /^c\d+$/.test(name));
      const fade = (on) => all(".line, .band, .dot, .span, .label", svg.parentElement).forEach((path) => {
        path.classList.toggle("faded", on && !path.classList.contains(colour));
      });
      const button = item.querySelector("button"), keys = all(".key button", figure);
      const held = () => keys.some((other) => other.getAttribute("aria-pressed") === "true");
      item.addEventListener("pointerenter", () => { if (!held()) fade(true); });
      item.addEventListener("pointerleave", () => { if (!held()) fade(false); });
      button.addEventListener("click", () => { // a click keeps it, until another
        const on = button.getAttribute("aria-pressed") !== "true";
        keys.forEach((other) => other.setAttribute("aria-pressed", String(on && other === button)));
        fade(on);
      });
    });
  }

  for (const svg of all("svg.trace")) {
    filter(svg);
    const series = JSON.parse(svg.dataset.series);
    const steps = Math.max(...series.map((line) => line.length)) - 1;
    const figure = svg.closest("figure");
    const values = all(".value", figure), at = figure.querySelector(".at"), cursor = svg.querySelector(".cursor");
    const resting = [...values, at].map((node) => node.textContent);
    const plot = svg.parentElement;
    const look = (event) => {
      const box = plot.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      const step = Math.round(share * steps);
      cursor.setAttribute("d", `M${steps ? 1000 * step / steps : 0} 0V400`);
      cursor.removeAttribute("hidden");
      series.forEach((line, k) => {
        values[k].textContent = short(line[Math.round(steps ? step / steps * (line.length - 1) : 0)]);
      });
      at.textContent = `at step ${step}`;
    };
    for (const kind of ["pointermove", "pointerdown"]) plot.addEventListener(kind, look);
    plot.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "touch") return; // a lifted finger still wants to read
      cursor.setAttribute("hidden", "");
      [...values, at].forEach((node, k) => { node.textContent = resting[k]; });
    });
  }

  // ---- genealogy: choose a population, and follow one particle
  for (const part of all(".genealogy")) {
    const row = part.querySelector(".pick-row"), population = part.querySelector(".pick-population");
    const output = part.querySelector("output"), resting = output.textContent;
    const show = () => {
      const count = Number(row.selectedOptions[0].dataset.populations);
      const wanted = Math.min(Number(population.value), count - 1);
      population.replaceChildren(...Array.from({ length: count }, (_, k) => new Option(k + 1, k)));
      population.value = wanted;
      for (const tree of all(".tree", part)) {
        tree.hidden = tree.dataset.row !== row.value || Number(tree.dataset.population) !== wanted;
      }
      output.textContent = resting;
    };
    for (const pick of [row, population]) pick.addEventListener("change", show);
    for (const plot of all("[data-tree]", part)) follow(plot, output, resting);
  }

  function follow(plot, output, resting) {
    let tree = null, at = null;
    const chosen = plot.querySelector(".chosen");
    const known = () => tree ??= JSON.parse(plot.dataset.tree);
    const y = (place) => 10 * place + 5;
    const age = (step) => known().events.filter((event) => event <= step).length; // how many resamplings lie behind

    const clear = () => { at = null; chosen.setAttribute("d", ""); output.textContent = resting; };

    const point = (step, place) => {
      const { steps, events, parents, particles, weight, reward } = known();
      at = { step, place };
      const k = age(step);
      // back to the start
      let d = `M${10 * step} ${y(place)}`, here = place;
      for (let e = k - 1; e >= 0; e--) {
        const above = parents[e][here];
        d += `H${10 * events[e]}L${10 * (events[e] - 1)} ${y(above)}`;
        here = above;
      }
      d += "H0";
      const founder = particles[0][here];
      // and on to the end
      let heirs = [place], from = step;
      for (let e = k; e < events.length; e++) {
        const before = 10 * (events[e] - 1);
        for (const one of heirs) d += `M${10 * from} ${y(one)}H${before}`;
        const next = [];
        parents[e].forEach((parent, child) => {
          if (heirs.includes(parent)) {
            next.push(child);
            d += `M${before} ${y(parent)}L${10 * events[e]} ${y(child)}`;
          }
        });
        heirs = next;
        from = events[e];
      }
      for (const one of heirs) d += `M${10 * from} ${y(one)}H${10 * steps}`;
      chosen.setAttribute("d", d);

      const finals = heirs.map((one) => particles[events.length][one]);
      const particle = particles[k][place];
      const said = [`Step ${step}, particle ${particle}`];
      if (k) said.push(`descends from particle ${founder} of the start`);
      if (step === steps) {
        said.push(`weight ${short(weight[particle])}`);
        if (reward) said.push(`reward ${short(reward[particle])}`);
      } else if (!finals.length) {
        said.push("died out");
      } else {
        const total = finals.reduce((sum, one) => sum + weight[one], 0);
        const some = finals.length === 1 ? `lives on as particle ${finals[0]}` : `${finals.length} descendants at the end`;
        said.push(`${some} with weight ${short(total)}`);
        if (reward) {
          const numbers = finals.map((one) => Number(String(reward[one]).replace("inf", "Infinity")));
          said.push(finals.length === 1 ? `reward ${short(numbers[0])}` : `best reward ${short(Math.max(...numbers))}`);
        }
      }
      output.textContent = said.join(" · ");
    };

    const aim = (event) => {
      const box = plot.getBoundingClientRect(), { steps, particles } = known(), size = particles[0].length;
      const inside = (share, most) => Math.min(most, Math.max(0, share));
      point(inside(Math.round((event.clientX - box.left) / box.width * steps), steps),
        inside(Math.floor((event.clientY - box.top) / box.height * size), size - 1));
    };
    for (const kind of ["pointermove", "pointerdown"]) plot.addEventListener(kind, aim);
    plot.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") clear(); });
    plot.addEventListener("blur", clear);
    plot.addEventListener("keydown", (event) => {
      const { steps, particles } = known(), size = particles[0].length;
      const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (event.key === "Escape") clear();
      if (!move) return;
      event.preventDefault();
      const { step, place } = at ?? { step: steps - move[0], place: -move[1] };
      point(Math.min(steps, Math.max(0, step + move[0])), Math.min(size - 1, Math.max(0, place + move[1])));
    });
  }
})();
