import { useEffect, useState } from "preact/hooks";
import { announce } from "../lib/announce";
import { checkAddress } from "../lib/bech32";
import { type Claim, checkMoniker, checkUrl, signedText, TOLERANCE } from "../lib/claim";
import { serverNow } from "../lib/clock";
import { useJson } from "../lib/hooks";
import { getJson, HttpError, postJson } from "../lib/http";
import { type Account, connect, explain, findKeplr, KeplrError, SWITCHED, sign } from "../lib/keplr";
import type { ChainInfo, Registration } from "../lib/types";
import { Field, Step } from "../parts/field";
import { PageHead } from "../parts/ui";
import { ClockWarning } from "./join/clock";
import { MethodChoice, type SigningMethod } from "./join/method";
import { Result } from "./join/result";
import { KeplrNotice, type Prepared, Review, SendNotice } from "./join/review";
import { useServer } from "./join/server";
import { CommandStep, KeplrStep, PasteStep } from "./join/signing";

export function Join() {
  const config = useServer();
  const chain = useJson<ChainInfo>("/api/chain");
  const prefix = chain.data?.bech32_prefix || "sv";
  const production = config.data?.mode !== "development";

  const [url, setUrl] = useState("");
  const [moniker, setMoniker] = useState("");
  const [method, setMethod] = useState<SigningMethod>("keplr");
  const [account, setAccount] = useState<Account | null>(null);
  const [chainId, setChainId] = useState("");
  const [typed, setTyped] = useState("");
  const [prepared, setPrepared] = useState<Prepared | null>(null);
  const [attempted, setAttempted] = useState(false);
  const [busy, setBusy] = useState<"connect" | "sign" | "send" | null>(null);
  const [problem, setProblem] = useState<KeplrError | HttpError | null>(null);
  const [result, setResult] = useState<Registration | null>(null);

  const details = { moniker: checkMoniker(moniker), url: checkUrl(url.trim(), production) };
  const valid = !details.moniker && !details.url;
  const address = method === "keplr" ? (account?.address ?? "") : typed.trim();
  const addressProblem = method === "tool" ? checkAddress(address, prefix) : null;

  const reset = () => {
    setPrepared(null);
    setProblem(null);
  };

  // A text is valid only for the account for which it was created.
  useEffect(() => {
    const onSwitch = () => {
      // During signing, `sign` handles the event.
      if (!account || busy) return;
      setAccount(null);
      setPrepared(null);
      setProblem(new KeplrError("switched"));
    };
    addEventListener(SWITCHED, onSwitch);
    return () => removeEventListener(SWITCHED, onSwitch);
  }, [account, busy]);

  async function attempt<T>(what: "connect" | "sign" | "send", work: () => Promise<T>): Promise<T | null> {
    setBusy(what);
    setProblem(null);
    try {
      return await work();
    } catch (error) {
      setProblem(error instanceof HttpError ? error : explain(error));
      return null;
    } finally {
      setBusy(null);
    }
  }

  const connectKeplr = () =>
    attempt("connect", async () => {
      setPrepared(null);
      const keplr = await findKeplr();
      const info = await getJson<ChainInfo>("/api/chain").catch(() => null);
      if (!info?.chain_id) throw new KeplrError("server");
      const connected = await connect(keplr, info);
      setAccount(connected);
      setChainId(info.chain_id);
      announce(`Connected: ${connected.name}`);
    });

  const review = () => {
    setAttempted(true);
    if (!valid) {
      document.getElementById(details.moniker ? "moniker" : "url")?.focus();
      return;
    }
    if (!address || addressProblem) {
      document.getElementById(method === "keplr" ? "connect" : "address")?.focus();
      return;
    }
    const claim = {
      operator_address: address,
      url: url.trim(),
      moniker: moniker.trim(),
      timestamp: Math.floor(serverNow()),
    };
    setProblem(null);
    setPrepared({ claim, text: signedText(claim) });
    announce("The text to sign is shown.");
  };

  const send = (claim: Claim, signed: { pub_key: string; signature: string }) =>
    attempt("send", async () => {
      setResult(await postJson<Registration>("/api/register-validator", { ...claim, ...signed }));
    });

  const signAndSend = async ({ claim, text }: Prepared) => {
    const signed = await attempt("sign", async () => {
      try {
        if (!account) throw new KeplrError("switched");
        return await sign(await findKeplr(), chainId, account, text);
      } catch (error) {
        const explained = explain(error);
        if (explained.problem === "switched") {
          setAccount(null);
          setPrepared(null);
        }
        throw explained;
      }
    });
    if (signed) await send(claim, signed);
  };

  if (result) {
    return (
      <Result
        result={result}
        moniker={moniker.trim()}
        onAgain={() => {
          setResult(null);
          reset();
        }}
      />
    );
  }

  return (
    <>
      <PageHead title="Join the network">
        Register your validator with the other operators. Your operator key signs a short text. This moves no funds, and
        the key never leaves your wallet or machine.
      </PageHead>
      <ClockWarning skew={config.skew} />
      <form
        class="steps"
        noValidate
        onSubmit={(event) => {
          event.preventDefault();
          if (method !== "command" && !prepared) review();
        }}
      >
        <Step number={1} title="Your validator">
          <Field
            id="moniker"
            label="Name"
            hint="Display name"
            value={moniker}
            problem={attempted || moniker ? details.moniker : null}
            autocomplete="organization"
            onInput={(value) => {
              setMoniker(value);
              reset();
            }}
          />
          <Field
            id="url"
            label="Helper URL"
            hint={`Public address of your helper, ${production ? "https:// only" : "http:// is allowed in development"}. Leave empty if you do not run a helper.`}
            value={url}
            problem={attempted || url ? details.url : null}
            type="url"
            placeholder="https://vote.example.org"
            autocomplete="url"
            onInput={(value) => {
              setUrl(value);
              reset();
            }}
          />
        </Step>

        <Step number={2} title="Your key">
          <MethodChoice
            method={method}
            onChoose={(chosen) => {
              setMethod(chosen);
              reset();
            }}
          />
          {method === "keplr" && (
            <KeplrStep
              account={account}
              busy={busy === "connect"}
              needed={attempted && !account}
              onConnect={connectKeplr}
            />
          )}
          {method === "tool" && (
            <Field
              id="address"
              label="Operator address"
              hint={`Account address (${prefix}1…) of the signing key`}
              value={typed}
              problem={attempted || typed ? addressProblem : null}
              autocomplete="off"
              mono
              onInput={(value) => {
                setTyped(value);
                reset();
              }}
            />
          )}
          {method === "command" && <CommandStep url={url.trim()} moniker={moniker.trim()} valid={valid} />}
          {problem instanceof KeplrError && !prepared && <KeplrNotice problem={problem} />}
        </Step>

        {method !== "command" && (
          <Step number={3} title="What you sign">
            {!prepared ? (
              <>
                <p class="muted">
                  You can review the exact text before you sign it. The signature is valid only for this registration,
                  for {TOLERANCE / 60} minutes.
                </p>
                <p>
                  <button
                    type="submit"
                    class={method === "keplr" && !account ? "" : "primary"}
                    disabled={busy !== null}
                  >
                    Show the text
                  </button>
                </p>
              </>
            ) : (
              <Review
                prepared={prepared}
                busy={busy}
                onRenew={review}
                onChange={() => {
                  reset();
                  document.getElementById("moniker")?.focus();
                }}
              >
                {(fresh) =>
                  method === "keplr" ? (
                    <button
                      type="button"
                      class="primary"
                      disabled={busy !== null || !fresh}
                      onClick={() => signAndSend(prepared)}
                    >
                      {busy === "sign"
                        ? "Waiting for Keplr…"
                        : busy === "send"
                          ? "Sending…"
                          : "Sign with Keplr and send"}
                    </button>
                  ) : (
                    <PasteStep
                      text={prepared.text}
                      busy={busy !== null}
                      fresh={fresh}
                      onSend={(signed) => send(prepared.claim, signed)}
                    />
                  )
                }
              </Review>
            )}
            {busy === "sign" && (
              <p role="status" class="muted">
                Keplr shows the same text in its own window. If no window opens, click the Keplr icon in the browser's
                toolbar.
              </p>
            )}
            {prepared && problem instanceof KeplrError && <KeplrNotice problem={problem} />}
            {problem instanceof HttpError && <SendNotice problem={problem} />}
          </Step>
        )}
      </form>
    </>
  );
}
