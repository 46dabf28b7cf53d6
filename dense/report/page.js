'use strict';
(() => {
  const root = document.documentElement;
  const tip = document.getElementById('tip');

  document.getElementById('theme').addEventListener('click', () => {
    const dark = matchMedia('(prefers-color-scheme: dark)').matches;
    const now = root.dataset.theme || (dark ? 'dark' : 'light');
    root.dataset.theme = now === 'dark' ? 'light' : 'dark';
  });

  // Singling out an arm: while the pointer is on it, or for good by a click.
  let chosen = null;
  const single = (arm) => {
    for (const series of document.querySelectorAll('.series')) {
      series.classList.toggle('dim', arm !== null && series.dataset.arm !== arm);
    }
  };
  for (const button of document.querySelectorAll('.legend button')) {
    const arm = button.dataset.arm;
    button.addEventListener('pointerenter', () => single(arm));
    button.addEventListener('pointerleave', () => single(chosen));
    button.addEventListener('click', () => {
      chosen = chosen === arm ? null : arm;
      for (const other of document.querySelectorAll('.legend button')) {
        other.setAttribute('aria-pressed', String(other.dataset.arm === chosen));
      }
      single(chosen);
    });
  }

  for (const chart of document.querySelectorAll('.chart')) {
    const store = chart.querySelector('script');
    if (!store) continue;
    const { x, lines } = JSON.parse(store.textContent);
    const svg = chart.querySelector('svg');
    const cursor = svg.querySelector('.cursor');
    const stops = [...new Map(lines.flatMap((line) => line.points.map((p) => [p[0], p[2]])))]
      .sort((a, b) => a[0] - b[0]);
    let current = -1;

    const show = (index) => {
      current = Math.max(0, Math.min(stops.length - 1, index));
      const [place, name] = stops[current];
      cursor.setAttribute('x1', place);
      cursor.setAttribute('x2', place);
      cursor.setAttribute('visibility', 'visible');
      const rows = lines
        .map((line) => ({ line, point: line.points.find((p) => p[0] === place) }))
        .filter((row) => row.point)
        .sort((a, b) => (a.point[1] ?? Infinity) - (b.point[1] ?? Infinity));
      const title = document.createElement('b');
      title.textContent = `${x} ${name}`;
      tip.replaceChildren(title, ...rows.map(({ line, point }) => {
        const row = document.createElement('span');
        const dot = document.createElement('i');
        const label = document.createElement('em');
        dot.style.background = line.colour;
        label.textContent = line.label;
        row.append(dot, label, point[3]);
        return row;
      }));
      tip.style.display = 'block';
      const box = svg.getBoundingClientRect();
      const at = box.left + (place / svg.viewBox.baseVal.width) * box.width;
      const wide = tip.offsetWidth;
      const left = at + 14 + wide > root.clientWidth ? at - 14 - wide : at + 14;
      tip.style.left = `${Math.max(4, left) + scrollX}px`;
      tip.style.top = `${box.top + scrollY + 12}px`;
    };
    const hide = () => {
      tip.style.display = 'none';
      cursor.setAttribute('visibility', 'hidden');
    };
    const nearest = (event) => {
      const box = svg.getBoundingClientRect();
      const place = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      let best = 0;
      stops.forEach(([stop], index) => {
        if (Math.abs(stop - place) < Math.abs(stops[best][0] - place)) best = index;
      });
      show(best);
    };
    svg.addEventListener('pointermove', nearest);
    svg.addEventListener('pointerdown', nearest);
    svg.addEventListener('pointerleave', hide);
    svg.addEventListener('blur', hide);
    svg.addEventListener('keydown', (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === 'Escape') hide();
      if (!step) return;
      event.preventDefault();
      show(current < 0 ? (step > 0 ? 0 : stops.length - 1) : current + step);
    });
  }

  addEventListener('beforeprint', () => {
    for (const details of document.querySelectorAll('details')) details.open = true;
  });
})();
