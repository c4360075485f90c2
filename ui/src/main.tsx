import "./style/main.css";
import { render } from "preact";
import { App } from "./app";
import { applyTheme, readTheme } from "./theme";

applyTheme(readTheme());
render(<App />, document.getElementById("app") as HTMLElement);
