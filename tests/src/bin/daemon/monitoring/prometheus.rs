//! The real Prometheus on node1, which scrapes shunt as `deploy/monitoring` says.

use std::{fs, fs::File, path::Path, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use proxy_userspace::kernel::command::Launcher;
use serde::Deserialize;
use serde_json::{Value, json};
use shunt_tests::{
    agent::protocol::GetRequest,
    deadline::Deadline,
    process::ChildProcess,
    world::{Host, World},
};

const ADDRESS: &str = "127.0.0.1:9090";
const START_TIMEOUT: Duration = Duration::from_secs(30);
const ANSWER_TIMEOUT: Duration = Duration::from_mins(1);

const RULES: &str = include_str!("../../../../../deploy/monitoring/rules.yaml");
const SCRAPE: &str = include_str!("../../../../../deploy/monitoring/scrape.yaml");
const POD_MONITOR: &str = include_str!("../../../../../deploy/monitoring/operator/podmonitor.yaml");

/// A running Prometheus. It ends with this value.
pub(super) struct Prometheus {
    url: String,
    _process: ChildProcess,
}

/// One series of an answer.
#[derive(Debug, Deserialize)]
pub(super) struct Series {
    /// Its labels.
    pub(super) metric: serde_json::Map<String, Value>,
    /// The time and the value of an instant query.
    #[serde(default)]
    value: Option<(f64, String)>,
    /// Those of a query over a range.
    #[serde(default)]
    values: Vec<(f64, String)>,
}

impl Series {
    /// Returns the value of an instant query, which may be NaN.
    pub(super) fn value(&self) -> f64 {
        self.value.as_ref().map_or(f64::NAN, |(_, value)| number(value))
    }

    /// Returns the times and values of a query over a range.
    pub(super) fn points(&self) -> Vec<(f64, f64)> {
        self.values.iter().map(|(time, value)| (*time, number(value))).collect()
    }
}

fn number(text: &str) -> f64 {
    text.parse().unwrap_or(f64::NAN)
}

impl Prometheus {
    /// Starts it with the rules of `deploy/monitoring`. It scrapes shunt each second as two jobs:
    /// as `shunt` by the plain configuration, and as `kube-proxy` by the `PodMonitor`.
    pub(super) fn start(world: &mut World) -> Result<Self> {
        let program = Launcher::default().find("prometheus");
        let program = program.context("there is no prometheus (of the package prometheus) in PATH")?;
        let directory = world.directory().join("prometheus");
        fs::create_dir(&directory).context("the directory of Prometheus")?;
        fs::write(directory.join("rules.yaml"), RULES)?;
        let config = directory.join("prometheus.yaml");
        fs::write(&config, serde_yaml_ng::to_string(&config_of_test()?)?)?;
        let arguments = [
            format!("--config.file={}", config.display()),
            format!("--storage.tsdb.path={}", directory.join("data").display()),
            format!("--web.listen-address={ADDRESS}"),
            "--log.level=warn".to_owned(),
        ];
        let log = directory.join("log");
        let process = world.spawn(Host::Node1, &program, &arguments, &File::create(&log)?)?;
        let this = Self { url: format!("http://{ADDRESS}"), _process: process };
        let is_ready = Deadline::after(START_TIMEOUT).poll(|| this.get(world, "/-/ready").ok());
        is_ready.with_context(|| format!("Prometheus does not start: {}", end_of(&log)))?;
        Ok(this)
    }

    /// Evaluates an expression at the present time.
    pub(super) fn query(&self, world: &mut World, expression: &str) -> Result<Vec<Series>> {
        self.ask(world, "query", expression, "")
    }

    /// Evaluates an expression over the last `seconds`, each two seconds.
    pub(super) fn query_range(
        &self,
        world: &mut World,
        expression: &str,
        seconds: f64,
    ) -> Result<Vec<Series>> {
        let [now] = &self.query(world, "vector(time())")?[..] else { bail!("Prometheus knows no time") };
        let end = now.value();
        let range = format!("&start={}&end={end}&step=2", end - seconds);
        self.ask(world, "query_range", expression, &range)
    }

    fn ask(&self, world: &mut World, kind: &str, expression: &str, range: &str) -> Result<Vec<Series>> {
        let encoded = utf8_percent_encode(expression, NON_ALPHANUMERIC);
        let page = self.get(world, &format!("/api/v1/{kind}?query={encoded}{range}"));
        let page = page.with_context(|| expression.to_owned())?;
        let mut answer: Value = serde_json::from_str(&page).context("the answer of Prometheus")?;
        Ok(serde_json::from_value(answer["data"]["result"].take())?)
    }

    fn get(&self, world: &mut World, path: &str) -> Result<String> {
        let request = GetRequest { url: format!("{}{path}", self.url), timeout: ANSWER_TIMEOUT };
        let page = world.agent(Host::Node1)?.get(request)?;
        let page = page.map_err(|failure| anyhow::anyhow!("{failure}"))?;
        ensure!(page.status == 200, "status {}: {}", page.status, page.body);
        Ok(page.body)
    }
}

fn end_of(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines().rev().take(3).collect::<Vec<_>>().join("; ")
}

/// The labels that Prometheus finds for the pod in a cluster, and those that the operator adds.
fn discovered() -> Value {
    json!([{
        "targets": ["no-port"],
        "labels": {
            "__meta_kubernetes_pod_ip": "127.0.0.1",
            "__meta_kubernetes_pod_node_name": "node1",
            "namespace": "kube-system",
            "pod": "shunt-x",
        },
    }])
}

/// Returns the configuration with the target in place of Kubernetes' API.
fn config_of_test() -> Result<Value> {
    let mut config: Value = serde_yaml_ng::from_str(SCRAPE).context("scrape.yaml")?;
    let plain = config["scrape_configs"][0].as_object_mut().context("scrape.yaml has no job")?;
    plain.remove("kubernetes_sd_configs").context("scrape.yaml does not find pods")?;
    plain.insert("static_configs".to_owned(), discovered());
    let of_monitor = job_of_monitor()?;
    config["scrape_configs"].as_array_mut().context("scrape.yaml has no jobs")?.push(of_monitor);
    config["global"] = json!({"scrape_interval": "1s", "evaluation_interval": "1s"});
    Ok(config)
}

/// Returns the job that the operator makes of the `PodMonitor`, with the job label of kube-proxy.
fn job_of_monitor() -> Result<Value> {
    let monitor: Value = serde_yaml_ng::from_str(POD_MONITOR).context("podmonitor.yaml")?;
    let endpoint = &monitor["spec"]["podMetricsEndpoints"][0];
    let relabelings = endpoint["relabelings"].as_array().context("podmonitor.yaml has no relabelings")?;
    let relabelings: Vec<Value> = relabelings.iter().map(relabeling).collect::<Result<_>>()?;
    Ok(json!({
        "job_name": "kube-system/shunt",
        "honor_labels": endpoint["honorLabels"],
        "static_configs": discovered(),
        "relabel_configs": relabelings,
    }))
}

/// Translates a rule of the operator to Prometheus' names.
fn relabeling(rule: &Value) -> Result<Value> {
    let fields = rule.as_object().context("a rule is no object")?.iter().map(|(name, value)| {
        let name = match &**name {
            "sourceLabels" => "source_labels",
            "targetLabel" => "target_label",
            "regex" | "replacement" => name,
            other => bail!("{other}: not known here"),
        };
        // As the page says for those who want to keep kube-proxy's job.
        let value = if *value == "shunt" { json!("kube-proxy") } else { value.clone() };
        Ok((name.to_owned(), value))
    });
    Ok(Value::Object(fields.collect::<Result<_>>()?))
}
