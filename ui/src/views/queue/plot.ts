import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { formatNumber } from "../../lib/format";

/** Draws one bar per minute in the current theme's colors. */
export function createPlot(
  box: HTMLElement,
  data: uPlot.AlignedData,
  height: number,
  onMinute: (minute: number | null) => void,
): uPlot {
  const style = getComputedStyle(document.documentElement);
  const colour = (name: string) => style.getPropertyValue(name).trim();
  const font = `12px ${style.fontFamily}`;
  const axis: uPlot.Axis = {
    stroke: colour("--muted"),
    font,
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { show: false },
  };
  const bars = uPlot.paths.bars?.({ size: [0.72, 24], align: 0 });
  return new uPlot(
    {
      width: box.clientWidth || 320,
      height,
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      scales: { x: { time: false, range: [-0.5, 59.5] }, y: { range: (_, _min, max) => [0, Math.max(4, max * 1.08)] } },
      axes: [
        { ...axis, grid: { show: false }, incrs: [5, 10, 15, 30], size: 28 },
        {
          ...axis,
          incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 50_000, 100_000],
          values: (_, marks) => marks.map(formatNumber),
          size: 52,
        },
      ],
      series: [
        {},
        {
          fill: colour("--accent"),
          width: 0,
          points: { show: false },
          ...(bars && { paths: bars }),
        },
      ],
      hooks: { setCursor: [(self) => onMinute(self.cursor.idx ?? null)] },
    },
    data,
    box,
  );
}
