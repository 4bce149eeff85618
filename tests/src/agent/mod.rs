//! The agent of a host: a process in the host's namespace and cgroup that answers on the host's
//! ports and opens connections for the runner. It is a process because a socket belongs to the
//! cgroup of the process that created it.

mod connection;
mod echo;
mod http;
mod load;
mod message;
pub mod protocol;

use std::{
    collections::HashMap,
    io::{BufRead as _, BufReader, Write as _},
    process::ChildStdin,
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use futures::{StreamExt as _, stream};

use self::{
    connection::{Connection, MessageSizes},
    load::Load,
    protocol::{
        Attempt, ConnectRequest, Failure, GetRequest, LoadReport, LoadRequest, Page, Request, Response,
        SendRequest,
    },
};
use crate::{
    bench::{self, BenchRequest, protocol::BenchResponse},
    deadline::scaled,
    process::{ChildProcess, HostContext, describe_status},
    world::Host,
};

/// The time that an agent may take in addition to what its request needs.
const ANSWER_TIMEOUT: Duration = Duration::from_mins(1);
const READY_TIMEOUT: Duration = Duration::from_secs(30);
/// The maximum number of concurrent attempts.
const MAX_CONCURRENT: usize = 64;

/// The runner's end of an agent.
pub struct Agent {
    // Declared first, so that it is closed first: the agent exits at the end of its input.
    requests: ChildStdin,
    answers: mpsc::Receiver<String>,
    process: ChildProcess,
}

impl Agent {
    /// Starts the agent of a host without waiting until it is ready.
    pub fn start(host: Host, inside: &HostContext) -> Result<Self> {
        let mut process = inside.spawn_agent(host.name())?;
        let requests = process.child().stdin.take().context("the agent has no input")?;
        let output = process.child().stdout.take().context("the agent has no output")?;
        let (sender, answers) = mpsc::channel();
        thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            // The thread ends with the agent's output, or when the receiver is gone.
            lines.map(|line| sender.send(line)).find(Result::is_err)
        });
        Ok(Self { requests, answers, process })
    }

    /// Returns the agent's process identifier.
    pub fn process_id(&mut self) -> u32 {
        self.process.child().id()
    }

    /// Waits until the host's servers are up.
    pub fn wait_until_ready(&mut self) -> Result<()> {
        match self.answer(scaled(READY_TIMEOUT))? {
            Response::Ready => Ok(()),
            other => bail!("expected the agent to be ready, but it answered {other:?}"),
        }
    }

    /// Opens connections. Returns one [`Attempt`] for each connection that was begun.
    pub fn connect(&mut self, request: ConnectRequest) -> Result<Vec<Attempt>> {
        let timeout = request.max_duration().saturating_add(scaled(ANSWER_TIMEOUT));
        self.attempts(&Request::Connect(request), timeout)
    }

    /// Opens a connection and keeps it open under the name `id`. It must be answered.
    pub fn open(&mut self, id: &str, request: ConnectRequest) -> Result<()> {
        let attempts = self.connect(ConnectRequest { hold: Some(id.to_owned()), attempts: 1, ..request })?;
        ensure!(matches!(attempts[..], [Attempt::Answered(_)]), "the first connection fails: {attempts:?}");
        Ok(())
    }

    /// Sends a byte on a connection that was kept open. It must be answered.
    pub fn check_open(&mut self, id: &str, timeout: Duration) -> Result<()> {
        let attempt = self.send(SendRequest { id: id.to_owned(), size: 1, answer: 0, timeout })?;
        ensure!(attempt.is_answered(), "an established connection has ended: {attempt:?}");
        Ok(())
    }

    /// Sends on a connection that was kept open.
    pub fn send(&mut self, send: SendRequest) -> Result<Attempt> {
        let timeout = send.timeout.saturating_add(scaled(ANSWER_TIMEOUT));
        self.attempts(&Request::Send(send), timeout)?.pop().context("the agent answered without an attempt")
    }

    /// Fetches a page.
    pub fn get(&mut self, get: GetRequest) -> Result<Result<Page, Failure>> {
        let timeout = get.timeout.saturating_add(scaled(ANSWER_TIMEOUT));
        match self.ask(&Request::Get(get), timeout)? {
            Response::Page(page) => Ok(page),
            other => bail!("expected a page, but the agent answered {other:?}"),
        }
    }

    /// Has the agent execute a request of the benchmark.
    pub fn bench(&mut self, request: BenchRequest, timeout: Duration) -> Result<BenchResponse> {
        match self.ask(&Request::Bench(request), timeout)? {
            Response::Bench(BenchResponse::Failed(why)) => bail!(why),
            Response::Bench(outcome) => Ok(outcome),
            other => bail!("expected a benchmark result, but the agent answered {other:?}"),
        }
    }

    /// Starts a load. Until [`Self::stop_load`], the agent accepts no other request.
    pub fn start_load(&mut self, load: LoadRequest) -> Result<()> {
        self.write(&Request::Load(load)).map(drop)
    }

    /// Ends the load. `longest` is the longest time that an exchange of it takes.
    pub fn stop_load(&mut self, longest: Duration) -> Result<LoadReport> {
        match self.ask(&Request::StopLoad, longest.saturating_add(scaled(ANSWER_TIMEOUT)))? {
            Response::Load(report) => Ok(report),
            other => bail!("expected the report of a load, but the agent answered {other:?}"),
        }
    }

    /// Closes all connections that were kept open.
    pub fn close(&mut self) -> Result<()> {
        self.attempts(&Request::Close, scaled(ANSWER_TIMEOUT)).map(drop)
    }

    fn attempts(&mut self, request: &Request, timeout: Duration) -> Result<Vec<Attempt>> {
        match self.ask(request, timeout)? {
            Response::Attempts(attempts) => Ok(attempts),
            other => bail!("expected attempts, but the agent answered {other:?}"),
        }
    }

    fn ask(&mut self, request: &Request, timeout: Duration) -> Result<Response> {
        let line = self.write(request)?;
        match self.answer(timeout)? {
            Response::InvalidRequest(error) => bail!("the agent rejects {}: {error}", line.trim_end()),
            response => Ok(response),
        }
    }

    /// Sends a request, and returns it as text.
    fn write(&mut self, request: &Request) -> Result<String> {
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        self.requests.write_all(line.as_bytes()).context("send a request to the agent")?;
        Ok(line)
    }

    fn answer(&mut self, timeout: Duration) -> Result<Response> {
        let Ok(line) = self.answers.recv_timeout(timeout) else {
            match self.process.exit_status()? {
                Some(status) => bail!("the agent ended with {}", describe_status(status)),
                None => bail!("the agent did not answer within {timeout:?}"),
            }
        };
        serde_json::from_str(&line).with_context(|| format!("the agent answered {line:?}"))
    }
}

/// Runs the agent until its input ends.
pub fn serve(host: &str) -> Result<()> {
    let host = Host::by_name(host).with_context(|| format!("no host is called {host:?}"))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        echo::start(host.name()).context("start the servers")?;
        answer(&Response::Ready)?;
        let (sender, mut requests) = tokio::sync::mpsc::channel(1);
        thread::spawn(move || {
            let lines = std::io::stdin().lines().map_while(Result::ok);
            lines.map(|line| sender.blocking_send(line)).find(Result::is_err)
        });
        let mut open_connections = HashMap::new();
        while let Some(line) = requests.recv().await {
            let response = match serde_json::from_str(&line) {
                Ok(Request::Bench(order)) => Response::Bench(bench::execute(order)),
                Ok(Request::Load(request)) => {
                    let load = Load::start();
                    // Any request ends the load, and so does the end of the input.
                    let end = async {
                        requests.recv().await;
                        load.stop();
                    };
                    tokio::join!(load.run(&request), end);
                    Response::Load(load.into_report())
                }
                Ok(request) => execute(request, &mut open_connections).await,
                Err(error) => Response::InvalidRequest(error.to_string()),
            };
            answer(&response)?;
        }
        Ok(())
    })
}

fn answer(response: &Response) -> Result<()> {
    println!("{}", serde_json::to_string(response)?);
    Ok(())
}

async fn execute(request: Request, open_connections: &mut HashMap<String, Connection>) -> Response {
    match request {
        Request::Connect(request) => Response::Attempts(connect_all(&request, open_connections).await),
        Request::Get(get) => Response::Page(http::get(&get).await),
        Request::Bench(_) | Request::Load(_) | Request::StopLoad => {
            Response::InvalidRequest("this request is executed elsewhere".to_owned())
        }
        Request::Close => {
            open_connections.clear();
            Response::Attempts(Vec::new())
        }
        Request::Send(send) => match open_connections.get_mut(&send.id) {
            Some(connection) => Response::Attempts(vec![outcome(
                connection.exchange(MessageSizes::of(&send), send.timeout).await,
            )]),
            None => {
                Response::InvalidRequest(format!("no connection is kept open under the name {:?}", send.id))
            }
        },
    }
}

async fn connect_all(
    request: &ConnectRequest,
    open_connections: &mut HashMap<String, Connection>,
) -> Vec<Attempt> {
    if request.order == protocol::Order::Concurrent && request.hold.is_none() {
        let attempts = (0..request.attempts).map(|number| connection::attempt(request, number));
        return stream::iter(attempts)
            .buffered(MAX_CONCURRENT)
            .map(|(_, result)| outcome(result))
            .collect()
            .await;
    }
    let mut attempts = Vec::new();
    for number in 0..request.attempts {
        if number > 0 {
            tokio::time::sleep(request.pause).await;
        }
        let (connection, result) = connection::attempt(request, number).await;
        if let (Some(id), Some(connection)) = (&request.hold, connection) {
            open_connections.insert(id.clone(), connection);
        }
        let failed = result.is_err();
        attempts.push(outcome(result));
        if failed && request.order == protocol::Order::UntilFailure {
            break;
        }
    }
    attempts
}

fn outcome(result: Result<protocol::Answer, Failure>) -> Attempt {
    match result {
        Ok(answer) => Attempt::Answered(answer),
        Err(failure) => Attempt::Failed(failure),
    }
}
