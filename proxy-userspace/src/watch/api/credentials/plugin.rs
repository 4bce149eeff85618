//! Runs the credential plugin of a kubeconfig (`exec`): at the first request, when its credentials
//! expire, and after the server did not accept them.

use std::{
    future::pending,
    io::{IsTerminal as _, stdin},
    panic::resume_unwind,
    process::Output,
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use kube::config::{ExecAuthCluster, ExecConfig, ExecInteractiveMode};
use serde::{Deserialize, Serialize};
use tokio::{
    process::Command,
    sync::Mutex,
    time::{Instant, timeout},
};

use super::{Credential, CredentialError, Identity, bearer, running_plugin::RunningPlugin};

const API_VERSIONS: [&str; 2] = ["client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"];
const KIND: &str = "ExecCredential";
/// The variable that has the plugin's input.
const INPUT: &str = "KUBERNETES_EXEC_INFO";
/// How long a plugin may run. client-go waits forever, and no request is sent meanwhile.
const LIMIT: Duration = Duration::from_mins(1);
/// How many characters of the plugin's standard error an error has, counted from the end.
const MAX_STDERR: usize = 500;

pub(in crate::watch::api) struct Plugin {
    command: String,
    exec: ExecConfig,
    api_version: String,
    /// Held while the plugin runs, so that it runs once for all requests.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    credential: Option<Credential>,
    expires: Option<Instant>,
    renewals: u64,
    /// The time and the cause of the last failure.
    failure: Option<(Instant, Arc<CredentialError>)>,
}

/// The input and output of a plugin.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ExecCredential {
    kind: String,
    api_version: String,
    #[serde(skip_deserializing, skip_serializing_if = "Option::is_none")]
    spec: Option<Spec>,
    #[serde(default, skip_serializing)]
    status: Option<Status>,
}

#[derive(Serialize)]
struct Spec {
    interactive: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster: Option<ExecAuthCluster>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    #[serde(default)]
    token: String,
    #[serde(default)]
    client_certificate_data: String,
    #[serde(default)]
    client_key_data: String,
    expiration_timestamp: Option<String>,
}

impl Plugin {
    /// Checks the settings as client-go does (`validateAuthInfo`), without running the plugin.
    pub(super) fn new(exec: &ExecConfig) -> Result<Self, CredentialError> {
        let refused = |why: String| Err(CredentialError::PluginSettings(why));
        let Some(command) = exec.command.clone().filter(|command| !command.is_empty()) else {
            return refused("command is missing".to_owned());
        };
        let api_version = exec.api_version.clone().unwrap_or_default();
        if !API_VERSIONS.contains(&&*api_version) {
            return refused(format!(
                "apiVersion is {api_version:?}, and must be one of {}",
                API_VERSIONS.join(", ")
            ));
        }
        // v1beta1 has a default.
        if exec.interactive_mode.is_none() && api_version == API_VERSIONS[0] {
            return refused("interactiveMode is missing: it must be Never, IfAvailable or Always".to_owned());
        }
        let plugin = Self { command, exec: exec.clone(), api_version, state: Mutex::default() };
        plugin.is_interactive()?;
        Ok(plugin)
    }

    /// Returns the credentials. Runs the plugin if there are none, or if they have expired. The
    /// plugin runs on if nobody waits for it any more, and the next request gets its credentials.
    pub(super) async fn current(self: &Arc<Self>) -> Result<Credential, Arc<CredentialError>> {
        let (plugin, since) = (Arc::clone(self), Instant::now());
        match tokio::spawn(async move { plugin.valid(since).await }).await {
            Ok(result) => result,
            Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
            // The runtime is shutting down, and this task with it.
            Err(_) => pending().await,
        }
    }

    /// Returns credentials that have not expired. Requests that wait for the same run share its
    /// failure: `since` is when this one began to wait.
    async fn valid(&self, since: Instant) -> Result<Credential, Arc<CredentialError>> {
        let mut state = self.state.lock().await;
        let is_expired = state.expires.is_some_and(|expires| Instant::now() >= expires);
        if let Some(credential) = state.credential.as_ref().filter(|_| !is_expired) {
            return Ok(credential.clone());
        }
        if let Some((_, why)) = state.failure.as_ref().filter(|(failed, _)| *failed >= since) {
            return Err(Arc::clone(why));
        }
        self.renew(&mut state).await.map_err(|error| {
            let why = Arc::new(error);
            state.failure = Some((Instant::now(), Arc::clone(&why)));
            why
        })
    }

    async fn renew(&self, state: &mut State) -> Result<Credential, CredentialError> {
        let status = self.run().await?;
        state.renewals += 1;
        let expires = status.expires().map_err(|why| self.failed(why))?;
        let credential = Credential {
            authorization: (!status.token.is_empty()).then(|| bearer(&status.token)).transpose()?,
            identity: status.identity().map_err(|why| self.failed(why))?,
            renewal: state.renewals,
        };
        if credential.authorization.is_none() && credential.identity.is_none() {
            return Err(self.failed("its answer has no token and no client certificate"));
        }
        (state.credential, state.expires) = (Some(credential.clone()), expires);
        Ok(credential)
    }

    /// Runs the plugin for the next request, unless it ran after `used`.
    pub(super) async fn reject(&self, used: &Credential) {
        let mut state = self.state.lock().await;
        state.credential.take_if(|credential| credential.renewal == used.renewal);
    }

    async fn run(&self) -> Result<Status, CredentialError> {
        let is_interactive = self.is_interactive()?;
        let cluster = self.exec.cluster.clone().filter(|_| self.exec.provide_cluster_info);
        let input = ExecCredential {
            kind: KIND.to_owned(),
            api_version: self.api_version.clone(),
            spec: Some(Spec { interactive: is_interactive, cluster }),
            status: None,
        };
        let input = serde_json::to_string(&input).map_err(|error| self.failed(error.to_string()))?;
        let mut command = Command::new(&self.command);
        command.args(self.exec.args.iter().flatten()).envs(self.variables()).env(INPUT, input);
        let started = |source| CredentialError::PluginStart { command: self.command.clone(), source };
        let mut running = RunningPlugin::start(command, is_interactive).map_err(started)?;
        if let Ok(output) = timeout(LIMIT, running.output()).await {
            return self.read(&output.map_err(started)?);
        }
        running.end().await;
        Err(self.failed(format!("it did not end within {} s", LIMIT.as_secs())))
    }

    /// Returns the variables of `env`.
    fn variables(&self) -> impl Iterator<Item = (&str, &str)> {
        let variables = self.exec.env.iter().flatten();
        variables.filter_map(|variable| Some((&**variable.get("name")?, &**variable.get("value")?)))
    }

    fn read(&self, output: &Output) -> Result<Status, CredentialError> {
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let skipped = stderr.chars().count().saturating_sub(MAX_STDERR);
            let stderr: String = stderr.chars().skip(skipped).collect();
            return Err(self.failed(format!("{}: {}", output.status, stderr.trim())));
        }
        // client-go reads YAML too.
        let answer: ExecCredential = serde_json::from_slice(&output.stdout)
            .or_else(|error| serde_yaml_ng::from_slice(&output.stdout).map_err(|_| error))
            .map_err(|error| self.failed(format!("cannot decode its answer: {error}")))?;
        if answer.kind != KIND || answer.api_version != self.api_version {
            let (kind, version) = (&answer.kind, &answer.api_version);
            return Err(
                self.failed(format!("its answer is a {kind} of {version}, not of {}", self.api_version))
            );
        }
        answer.status.ok_or_else(|| self.failed("its answer has no status"))
    }

    /// Returns true if the plugin may ask its user.
    fn is_interactive(&self) -> Result<bool, CredentialError> {
        match self.exec.interactive_mode {
            Some(ExecInteractiveMode::Never) => Ok(false),
            Some(ExecInteractiveMode::IfAvailable) | None => Ok(stdin().is_terminal()),
            Some(ExecInteractiveMode::Always) if stdin().is_terminal() => Ok(true),
            Some(ExecInteractiveMode::Always) => Err(CredentialError::PluginSettings(
                "interactiveMode is Always, but standard input is not a terminal".to_owned(),
            )),
        }
    }

    fn failed(&self, why: impl Into<String>) -> CredentialError {
        CredentialError::Plugin { command: self.command.clone(), why: why.into() }
    }
}

impl Status {
    /// Returns when the credentials expire. Later changes of the wall clock have no effect.
    fn expires(&self) -> Result<Option<Instant>, String> {
        let Some(text) = &self.expiration_timestamp else { return Ok(None) };
        let at: Timestamp = text.parse().map_err(|error| format!("expirationTimestamp {text:?}: {error}"))?;
        let left = Duration::try_from(at.duration_since(Timestamp::now())).unwrap_or_default();
        Ok(Some(Instant::now() + left))
    }

    fn identity(&self) -> Result<Option<Arc<Identity>>, &'static str> {
        match (self.client_certificate_data.is_empty(), self.client_key_data.is_empty()) {
            (true, true) => Ok(None),
            (false, false) => Ok(Some(Arc::new(Identity {
                certificate: self.client_certificate_data.clone(),
                key: self.client_key_data.clone(),
            }))),
            _ => Err("its answer has a certificate or a key, but not both"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };

    use super::*;

    const ANSWER: &str = r#"{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "t"}}"#;

    fn plugin(script: &str) -> Arc<Plugin> {
        let exec = serde_json::json!({
            "apiVersion": API_VERSIONS[0], "command": "sh", "args": ["-c", script], "interactiveMode": "Never",
        });
        Arc::new(Plugin::new(&serde_json::from_value(exec).expect("exec")).expect("a plugin"))
    }

    #[tokio::test]
    async fn a_request_that_gives_up_does_not_end_the_plugin() {
        let directory = tempfile::TempDir::new().expect("a directory");
        let runs = directory.path().join("runs");
        let plugin = plugin(&format!("echo run >> {}; sleep 0.5; echo '{ANSWER}'", runs.display()));
        let first = timeout(Duration::from_millis(100), plugin.current()).await;
        assert!(first.is_err(), "it is still running");
        let credential = plugin.current().await.expect("a token");
        assert_eq!(credential.authorization.expect("a token"), "Bearer t");
        assert_eq!(std::fs::read_to_string(runs).expect("runs"), "run\n");
    }

    #[tokio::test(start_paused = true)]
    async fn a_plugin_that_does_not_end_is_named_and_all_that_wait_share_the_failure() {
        let plugin = plugin("exec sleep 1000");
        let began = Instant::now();
        let (first, second) = tokio::join!(plugin.current(), plugin.current());
        assert!(began.elapsed() < 2 * LIMIT, "one run for both: {:?}", began.elapsed());
        for error in [first.err(), second.err()].map(|error| error.expect("no answer").to_string()) {
            assert_eq!(error, "the credential plugin sh failed: it did not end within 60 s");
        }
    }

    /// Waits until the file has the number of a process, and then until that process is gone.
    async fn wait_until_gone(file: &Path) {
        let deadline = Duration::from_mins(1);
        let is_gone = async {
            loop {
                let number = std::fs::read_to_string(file).unwrap_or_default();
                let status = std::fs::read_to_string(format!("/proc/{}/status", number.trim()));
                // A process that nobody has waited for yet is a zombie.
                let is_gone = status.is_ok_and(|status| status.contains("State:\tZ"));
                if number.ends_with('\n') && (is_gone || !exists(number.trim())) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(deadline, is_gone).await.expect("it still runs");
    }

    fn exists(process: &str) -> bool {
        Path::new("/proc").join(process).exists()
    }

    /// The script starts the program that hangs as a child, and waits for it.
    #[tokio::test]
    async fn the_program_that_a_plugins_script_started_does_not_outlive_a_request_that_is_given_up() {
        let directory = tempfile::TempDir::new().expect("a directory");
        let number = directory.path().join("number");
        let plugin = plugin(&format!("sleep 1000 & echo $! > {}; wait", number.display()));
        let has_begun = async {
            while !std::fs::read_to_string(&number).is_ok_and(|number| number.ends_with('\n')) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        // Then the request is given up.
        tokio::select! {
            _ = plugin.run() => panic!("it does not wait for its child"),
            () = has_begun => {}
        }
        wait_until_gone(&number).await;
    }

    #[tokio::test]
    async fn an_answer_counts_although_a_process_that_the_plugin_left_keeps_the_output_open() {
        let directory = tempfile::TempDir::new().expect("a directory");
        let number = directory.path().join("number");
        let script = format!("sleep 1000 & echo $! > {}; echo '{ANSWER}'", number.display());
        let credential = plugin(&script).current().await.expect("a token");
        assert_eq!(credential.authorization.expect("a token"), "Bearer t");
        kill_left(&number);
    }

    #[tokio::test]
    async fn what_a_plugin_leaves_running_after_its_answer_is_not_killed() {
        let directory = tempfile::TempDir::new().expect("a directory");
        let number = directory.path().join("number");
        let script = format!("sleep 30 > /dev/null 2>&1 & echo $! > {}; echo '{ANSWER}'", number.display());
        plugin(&script).current().await.expect("a token");
        kill_left(&number);
    }

    /// Kills the process with the number in the file: a cache for the next run.
    fn kill_left(file: &Path) {
        let number = std::fs::read_to_string(file).expect("a number");
        assert!(exists(number.trim()), "it was killed");
        let process = Pid::from_raw(number.trim().parse().expect("a number"));
        kill(process, Signal::SIGKILL).expect("it runs");
    }
}
