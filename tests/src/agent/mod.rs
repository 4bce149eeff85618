//! The agent of a host: a process in the host's namespace and cgroup that answers on its ports and opens connections
//! for the runner. A process, because a socket belongs to the cgroup of the process that made it.

mod dial;
mod echo;
mod http;
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

use anyhow::{Context as _, Result, bail};
use futures::{StreamExt as _, stream};

use self::{
    dial::{Held, Size},
    protocol::{Dial, Failure, Get, Page, Request, Response, Send, Try},
};
use crate::{
    bench::{self, Order, order::Outcome},
    deadline::patient,
    process::{Inside, Running, describe},
    world::Host,
};

/// How long an agent may take beyond what its request says.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
const READY_WITHIN: Duration = Duration::from_secs(10);
/// Tries that are on their way at the same time.
const AT_ONCE: usize = 64;

/// The runner's end of an agent.
pub struct Agent {
    // Closed first: the agent exits at the end of its input.
    requests: ChildStdin,
    answers: mpsc::Receiver<String>,
    process: Running,
}

impl Agent {
    /// Starts the agent of a host; it is not ready yet.
    pub fn start(host: Host, inside: &Inside) -> Result<Self> {
        let mut process = inside.spawn_agent(host.name())?;
        let requests = process.child().stdin.take().context("the agent has no input")?;
        let output = process.child().stdout.take().context("the agent has no output")?;
        let (sender, answers) = mpsc::channel();
        thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            // Ends with the agent's output, or when nobody wants its answers any more.
            lines.map(|line| sender.send(line)).find(Result::is_err)
        });
        Ok(Self { requests, answers, process })
    }

    /// The agent's process.
    pub fn process_id(&mut self) -> u32 {
        self.process.child().id()
    }

    /// Waits until the host's servers are up.
    pub fn wait_until_ready(&mut self) -> Result<()> {
        match self.answer(patient(READY_WITHIN))? {
            Response::Ready => Ok(()),
            other => bail!("expected the agent to be ready, it says {other:?}"),
        }
    }

    /// Opens connections; one [`Try`] for each that was begun.
    pub fn dial(&mut self, dial: Dial) -> Result<Vec<Try>> {
        let within = dial.longest().saturating_add(patient(ANSWER_WITHIN));
        self.tries(&Request::Dial(dial), within)
    }

    /// Sends on a connection that was kept open.
    pub fn send(&mut self, send: Send) -> Result<Try> {
        let within = send.timeout.saturating_add(patient(ANSWER_WITHIN));
        self.tries(&Request::Send(send), within)?.pop().context("the agent answered without a try")
    }

    /// Fetches a page.
    pub fn get(&mut self, get: Get) -> Result<Result<Page, Failure>> {
        let within = get.timeout.saturating_add(patient(ANSWER_WITHIN));
        match self.ask(&Request::Get(get), within)? {
            Response::Page(page) => Ok(page),
            other => bail!("expected a page, the agent says {other:?}"),
        }
    }

    /// Has it take part in the benchmark.
    pub fn bench(&mut self, order: Order, within: Duration) -> Result<Outcome> {
        match self.ask(&Request::Bench(order), within)? {
            Response::Bench(Outcome::Failed(why)) => bail!(why),
            Response::Bench(outcome) => Ok(outcome),
            other => bail!("expected figures, the agent says {other:?}"),
        }
    }

    /// Closes the connections kept open.
    pub fn close(&mut self) -> Result<()> {
        self.tries(&Request::Close, patient(ANSWER_WITHIN)).map(drop)
    }

    fn tries(&mut self, request: &Request, within: Duration) -> Result<Vec<Try>> {
        match self.ask(request, within)? {
            Response::Tries(tries) => Ok(tries),
            other => bail!("expected tries, the agent says {other:?}"),
        }
    }

    fn ask(&mut self, request: &Request, within: Duration) -> Result<Response> {
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        self.requests.write_all(line.as_bytes()).context("send a request to the agent")?;
        match self.answer(within)? {
            Response::Mistake(mistake) => bail!("the agent refuses {}: {mistake}", line.trim_end()),
            response => Ok(response),
        }
    }

    fn answer(&mut self, within: Duration) -> Result<Response> {
        let Ok(line) = self.answers.recv_timeout(within) else {
            match self.process.ended()? {
                Some(status) => bail!("the agent ended with {}", describe(status)),
                None => bail!("the agent did not answer within {within:?}"),
            }
        };
        serde_json::from_str(&line).with_context(|| format!("the agent answered {line:?}"))
    }
}

/// The agent's `main`: serves until its input ends.
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
        let mut held = HashMap::new();
        let mut benching = bench::Benching::default();
        while let Some(line) = requests.recv().await {
            let response = match serde_json::from_str(&line) {
                Ok(Request::Bench(order)) => Response::Bench(benching.obey(order)),
                Ok(request) => execute(request, &mut held).await,
                Err(error) => Response::Mistake(error.to_string()),
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

async fn execute(request: Request, held: &mut HashMap<String, Held>) -> Response {
    match request {
        Request::Dial(dial) => Response::Tries(dial_all(&dial, held).await),
        Request::Get(get) => Response::Page(http::get(&get).await),
        Request::Bench(_) => Response::Mistake("the benchmark is not for this part".to_owned()),
        Request::Close => {
            held.clear();
            Response::Tries(Vec::new())
        }
        Request::Send(send) => match held.get_mut(&send.id) {
            Some(connection) => {
                Response::Tries(vec![outcome(connection.ask(Size::of_send(&send), send.timeout).await)])
            }
            None => Response::Mistake(format!("no connection is kept under {:?}", send.id)),
        },
    }
}

async fn dial_all(dial: &Dial, held: &mut HashMap<String, Held>) -> Vec<Try> {
    if dial.order == protocol::Order::AtOnce && dial.hold.is_none() {
        let tries = (0..dial.tries).map(|number| dial::one(dial, number));
        return stream::iter(tries).buffered(AT_ONCE).map(|(_, result)| outcome(result)).collect().await;
    }
    let mut tries = Vec::new();
    for number in 0..dial.tries {
        if number > 0 {
            tokio::time::sleep(dial.pause).await;
        }
        let (connection, result) = dial::one(dial, number).await;
        if let (Some(id), Some(connection)) = (&dial.hold, connection) {
            held.insert(id.clone(), connection);
        }
        let failed = result.is_err();
        tries.push(outcome(result));
        if failed && dial.order == protocol::Order::UntilFailure {
            break;
        }
    }
    tries
}

fn outcome(result: Result<protocol::Answer, Failure>) -> Try {
    match result {
        Ok(answer) => Try::Answered(answer),
        Err(failure) => Try::Failed(failure),
    }
}
