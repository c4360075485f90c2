import { useEffect, useRef, useState } from "preact/hooks";
import type uPlot from "uplot";
import { formatNumber } from "../../lib/format";
import { THEMED } from "../../theme";

const HEIGHT = 200;
const MINUTES = Array.from({ length: 60 }, (_, minute) => minute);

/** Chart and table of shares due per minute. */
export function Histogram({ minutes }: { minutes: number[] }) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const newest = useRef(minutes);
  const [at, setAt] = useState<number | null>(null);
  newest.current = minutes;

  useEffect(() => {
    let gone = false;
    let undo = () => {};
    // The chart library is loaded only when a chart is shown.
    import("./plot").then(({ makePlot }) => {
      if (gone || !place.current) return;
      const box = place.current;
      const draw = () => {
        plot.current?.destroy();
        plot.current = makePlot(box, [MINUTES, newest.current], HEIGHT, setAt);
      };
      draw();
      const watch = new ResizeObserver(() => plot.current?.setSize({ width: box.clientWidth, height: HEIGHT }));
      watch.observe(box);
      const dark = matchMedia("(prefers-color-scheme: dark)");
      dark.addEventListener("change", draw);
      addEventListener(THEMED, draw);
      undo = () => {
        watch.disconnect();
        dark.removeEventListener("change", draw);
        removeEventListener(THEMED, draw);
        plot.current?.destroy();
        plot.current = null;
      };
    });
    return () => {
      gone = true;
      undo();
    };
  }, []);

  useEffect(() => plot.current?.setData([MINUTES, minutes]), [minutes]);

  return (
    <>
      <div class="chart" ref={place} aria-hidden="true" />
      <p class="chart-read small" aria-hidden="true">
        {at === null ? "Minutes from now" : `${at === 0 ? "Now" : `In ${at} min`}: ${formatNumber(minutes[at] ?? 0)}`}
      </p>
      <details class="figures-table">
        <summary>Show as table</summary>
        <table>
          <caption class="sr-only">Shares due per minute; minutes without shares are omitted</caption>
          <thead>
            <tr>
              <th scope="col">Minutes from now</th>
              <th scope="col" class="number">
                Shares
              </th>
            </tr>
          </thead>
          <tbody>
            {minutes.map(
              (count, minute) =>
                count > 0 && (
                  <tr key={minute}>
                    <th scope="row">{minute === 0 ? "0 (and overdue)" : minute}</th>
                    <td class="number">{formatNumber(count)}</td>
                  </tr>
                ),
            )}
          </tbody>
        </table>
      </details>
    </>
  );
}
