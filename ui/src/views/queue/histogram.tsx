import { useEffect, useRef, useState } from "preact/hooks";
import type uPlot from "uplot";
import { formatNumber } from "../../lib/format";
import { THEME_CHANGED } from "../../theme";

const HEIGHT = 200;
const MINUTES = Array.from({ length: 60 }, (_, minute) => minute);

/** Chart and table of shares due per minute. */
export function Histogram({ minutes }: { minutes: number[] }) {
  const container = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const newest = useRef(minutes);
  const [at, setAt] = useState<number | null>(null);
  newest.current = minutes;

  useEffect(() => {
    let unmounted = false;
    let cleanUp = () => {};
    // The chart library is loaded only when a chart is shown.
    import("./plot").then(({ createPlot }) => {
      if (unmounted || !container.current) return;
      const box = container.current;
      const draw = () => {
        plot.current?.destroy();
        plot.current = createPlot(box, [MINUTES, newest.current], HEIGHT, setAt);
      };
      draw();
      const observer = new ResizeObserver(() => plot.current?.setSize({ width: box.clientWidth, height: HEIGHT }));
      observer.observe(box);
      const dark = matchMedia("(prefers-color-scheme: dark)");
      dark.addEventListener("change", draw);
      addEventListener(THEME_CHANGED, draw);
      cleanUp = () => {
        observer.disconnect();
        dark.removeEventListener("change", draw);
        removeEventListener(THEME_CHANGED, draw);
        plot.current?.destroy();
        plot.current = null;
      };
    });
    return () => {
      unmounted = true;
      cleanUp();
    };
  }, []);

  useEffect(() => plot.current?.setData([MINUTES, minutes]), [minutes]);

  return (
    <>
      <div class="chart" ref={container} aria-hidden="true" />
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
