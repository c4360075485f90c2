import { useMemo, useState } from "preact/hooks";
import { formatDuration, formatRough, plural } from "../lib/format";
import { useNow, usePages } from "../lib/hooks";
import type { PendingValidator } from "../lib/types";
import { Copy, Empty, ExternalLink, Loaded, Name, PageHead } from "../parts/ui";

const COLUMNS = [
  { key: "moniker", label: "Name" },
  { key: "operator_address", label: "Operator address" },
  { key: "url", label: "Helper URL" },
  { key: "requested_at", label: "Waiting for" },
  { key: "expires_at", label: "Expires in" },
] as const;

type Column = (typeof COLUMNS)[number]["key"];
export interface Order {
  by: Column;
  descending: boolean;
}

/** The validators that match every search word, in the selected order. */
export function searchAndSort(
  all: readonly PendingValidator[],
  search: string,
  { by, descending }: Order,
): PendingValidator[] {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const matching = all.filter(({ moniker, operator_address, url }) => {
    const text = `${moniker} ${operator_address} ${url}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const sign = descending ? -1 : 1;
  return matching.sort((a, b) => {
    // The longest wait has the earliest request time.
    const order =
      by === "requested_at"
        ? b[by] - a[by]
        : by === "expires_at"
          ? a[by] - b[by]
          : a[by].localeCompare(b[by], undefined, { sensitivity: "base", numeric: true });
    return sign * order || (a.operator_address < b.operator_address ? -1 : 1);
  });
}

export function Validators() {
  const waiting = usePages<PendingValidator>("/api/pending-validators", 10_000);
  return (
    <>
      <PageHead title="Pending validators">
        Validators that have proven ownership of their keys and are not bonded yet. An entry is removed when its
        validator bonds, or after seven days.
      </PageHead>
      <Loaded from={waiting} what="the pending validators">
        {({ entries, more }) =>
          entries.length ? (
            <>
              {more && (
                <p class="muted" role="note">
                  This page shows only the {entries.length} oldest registrations.
                </p>
              )}
              <Table all={entries} />
            </>
          ) : (
            <Empty title="No pending validators">
              <p>
                New registrations appear here within seconds. To add yours, go to <a href="/join">Join</a>.
              </p>
            </Empty>
          )
        }
      </Loaded>
    </>
  );
}

function Table({ all }: { all: PendingValidator[] }) {
  const now = useNow(1_000);
  const [search, setSearch] = useState("");
  const [order, setOrder] = useState<Order>({ by: "requested_at", descending: false });
  const visible = useMemo(() => searchAndSort(all, search, order), [all, search, order]);
  const sortBy = (by: Column) => setOrder({ by, descending: by === order.by ? !order.descending : false });

  return (
    <>
      <div class="tools">
        <label class="field inline">
          <span>Search</span>
          <input
            type="search"
            value={search}
            placeholder="Name, address or URL"
            autocomplete="off"
            onInput={(event) => setSearch(event.currentTarget.value)}
          />
        </label>
        <label class="field inline narrow-only">
          <span>Sort by</span>
          <select
            value={order.by}
            onChange={(event) => setOrder({ by: event.currentTarget.value as Column, descending: false })}
          >
            {COLUMNS.map(({ key, label }) => (
              <option key={key} value={key}>
                {label}
              </option>
            ))}
          </select>
        </label>
        <p class="muted count" role="status">
          {visible.length === all.length
            ? plural(all.length, "validator")
            : `${visible.length} of ${plural(all.length, "validator")}`}
        </p>
      </div>
      {visible.length === 0 ? (
        <Empty title="No match">
          <p>
            No pending validator has “{search}” in its name, address or URL.{" "}
            <button type="button" class="link" onClick={() => setSearch("")}>
              Clear the search
            </button>
          </p>
        </Empty>
      ) : (
        <table class="stacked waiting" role="table">
          <caption class="sr-only">Validators that are not bonded yet</caption>
          <thead role="rowgroup">
            <tr role="row">
              {COLUMNS.map(({ key, label }) => (
                <th
                  key={key}
                  role="columnheader"
                  scope="col"
                  class={key.endsWith("_at") ? "number" : ""}
                  aria-sort={order.by === key ? (order.descending ? "descending" : "ascending") : "none"}
                >
                  <button type="button" class="sort" onClick={() => sortBy(key)}>
                    {label}
                    <svg viewBox="0 0 8 8" width="8" height="8" aria-hidden="true">
                      <path d={order.by === key && order.descending ? "M1 2.5 4 6 7 2.5z" : "M1 5.5 4 2 7 5.5z"} />
                    </svg>
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody role="rowgroup">
            {visible.map((validator) => (
              <tr role="row" key={validator.operator_address}>
                <td role="cell" data-label="Name">
                  <strong>
                    <bdi>{validator.moniker}</bdi>
                  </strong>
                </td>
                <td role="cell" data-label="Address">
                  <Name text={validator.operator_address} what={`address of ${validator.moniker}`} />
                </td>
                <td role="cell" data-label="URL">
                  {validator.url ? (
                    <span class="name">
                      <ExternalLink href={validator.url} brief />
                      <Copy text={validator.url} what={`URL of ${validator.moniker}`} />
                    </span>
                  ) : (
                    <span class="muted">none</span>
                  )}
                </td>
                <td role="cell" data-label="Waiting for" class="number">
                  {formatRough(now - validator.requested_at)}
                </td>
                <td role="cell" data-label="Expires in" class="number">
                  {validator.expires_at > now ? (
                    <span class={validator.expires_at - now < 86_400 ? "soon" : ""}>
                      {formatDuration(validator.expires_at - now)}
                    </span>
                  ) : (
                    <span class="muted">expired</span>
                  )}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </>
  );
}
