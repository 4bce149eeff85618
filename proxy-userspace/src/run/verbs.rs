//! The subcommands that ask the daemon of this node, and print the answer.

use std::{
    collections::HashSet,
    io::{self, Write as _, stdout},
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use proxy_userspace::{
    causes::with_causes,
    inspect::{
        AffinityFilter, AffinityRow, Client, ClientError, ConnectionRow, DriftRow, EndpointRow, ExemptRow,
        ExplainArguments, Filter, FlowFilter, FlowRow, GetArguments, LeftOutRow, LinkRow, Output, Resource,
        Row, ServiceName, ServiceRow, Verb, print, print_one, read_without_daemon, table,
    },
    trace::CaptureError,
};
use tokio::{runtime, time::sleep};

use super::{offline, others, standard_error::tell, trace::trace};

/// The exit code for a wrong command line, as that of clap.
pub(super) const WRONG_USAGE: u8 = 2;
/// The exit code if model and kernel differ.
const DIFFERS: u8 = 3;
/// How often `--watch` asks.
const WATCH_PERIOD: Duration = Duration::from_secs(1);

/// Runs a verb to its end.
pub(crate) fn verb(verb: &Verb) -> ExitCode {
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime.context("cannot start the runtime").and_then(|runtime| {
        runtime.block_on(async {
            match verb {
                Verb::Get(arguments) => get(arguments).await,
                Verb::Explain(arguments) => explain(arguments).await,
                Verb::Trace(arguments) => trace(arguments).await,
            }
        })
    });
    match done {
        Ok(code) => code,
        // The reader of the output has enough, as with `| head`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            tell_error(&error);
            ExitCode::FAILURE
        }
    }
}

/// Writes an error of a command. Only errors of standard output have no context.
pub(super) fn tell_error(error: &anyhow::Error) {
    if error.is::<io::Error>() && error.chain().len() == 1 {
        tell(format_args!("cannot write to standard output: {error}"));
    } else {
        tell(with_causes(error.as_ref()));
    }
}

pub(super) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let is_it = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    let of_packets = error.is::<CaptureError>()
        && error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>()).any(is_it);
    of_packets || error.downcast_ref::<io::Error>().is_some_and(is_it)
}

async fn get(arguments: &GetArguments) -> anyhow::Result<ExitCode> {
    if let Some(unused) = arguments.unused() {
        tell(format_args!("{unused} has no meaning for {}", arguments.resource.path()));
        return Ok(ExitCode::from(WRONG_USAGE));
    }
    match arguments.resource {
        Resource::Services => list::<ServiceRow>(arguments).await,
        Resource::Endpoints => list::<EndpointRow>(arguments).await,
        Resource::Flows => list::<FlowRow>(arguments).await,
        Resource::Connections => list::<ConnectionRow>(arguments).await,
        Resource::Affinity => list::<AffinityRow>(arguments).await,
        Resource::Links => list::<LinkRow>(arguments).await,
        Resource::Exempt => list::<ExemptRow>(arguments).await,
        Resource::LeftOut => list::<LeftOutRow>(arguments).await,
        Resource::Drift => list::<DriftRow>(arguments).await,
    }
}

async fn list<T: Row>(arguments: &GetArguments) -> anyhow::Result<ExitCode> {
    let GetArguments { resource, name, namespace, output, watch, .. } = arguments;
    let rows: Vec<T> = read(arguments).await?;
    if rows.is_empty() && matches!(output, Output::Table | Output::Wide) {
        let within = namespace.as_deref().map(|namespace| format!(" in the namespace {namespace}"));
        let of = name.as_deref().map(|name| format!(" of a Service {name}"));
        let [of, within] = [of, within].map(Option::unwrap_or_default);
        let why = unserved(arguments).await.map(|why| format!(": {why}")).unwrap_or_default();
        tell(format_args!("no {}{of}{within}{why}", resource.path()));
    } else {
        print(output, resource.kind(), &rows, &mut stdout().lock())?;
    }
    if *watch {
        follow(arguments, &rows).await?;
    }
    let is_missing = rows.is_empty() && name.is_some() && !has_service(arguments).await?;
    Ok(if is_missing { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Returns true if the named Service is there, or nobody knows: then no shunt runs. The list of
/// Services has a row for each; a Service without endpoints has none in the others.
async fn has_service(arguments: &GetArguments) -> anyhow::Result<bool> {
    let GetArguments { resource, name, namespace, .. } = arguments;
    if *resource == Resource::Services {
        return Ok(false);
    }
    let mut client = match Client::connect().await {
        Err(ClientError::NotRunning(_)) => return Ok(true),
        connected => connected?,
    };
    let filter = Filter { namespace: namespace.clone(), name: name.clone(), drift: false };
    let mut is_there = false;
    client.list(Resource::Services, &filter, |_: ServiceRow| is_there = true).await?;
    Ok(is_there)
}

/// Says why the named Service is not served. `None` without a namespace: there may be several.
async fn unserved(GetArguments { name, namespace, .. }: &GetArguments) -> Option<String> {
    let service = ServiceName { namespace: namespace.clone()?, name: name.clone()? };
    Client::connect().await.ok()?.unserved(&service).await
}

async fn read<T: Row>(arguments: &GetArguments) -> anyhow::Result<Vec<T>> {
    let GetArguments { resource, name, namespace, flows, drift, .. } = arguments;
    let mut rows = Vec::new();
    let mut client = match Client::connect().await {
        Ok(client) => client,
        Err(error @ ClientError::NotRunning(_)) => return without_daemon(arguments, error).await,
        Err(error) => return Err(error.into()),
    };
    let (namespace, name) = (namespace.clone(), name.clone());
    let on_row = |row| rows.push(row);
    match resource {
        Resource::Flows | Resource::Connections => client.list(*resource, flows, on_row).await?,
        Resource::Affinity => {
            let FlowFilter { client: of, endpoint, .. } = *flows;
            let filter = AffinityFilter { namespace, name, client: of, endpoint };
            client.list(*resource, &filter, on_row).await?;
        }
        _ => client.list(*resource, &Filter { namespace, name, drift: *drift }, on_row).await?,
    }
    Ok(rows)
}

/// Reads what the kernel alone can tell.
async fn without_daemon<T: Row>(arguments: &GetArguments, error: ClientError) -> anyhow::Result<Vec<T>> {
    let GetArguments { resource, flows, pin_directory, .. } = arguments;
    let Some(read) = read_without_daemon(*resource, flows, pin_directory).await else {
        return Err(error.into());
    };
    tell("no shunt runs in this network namespace, so nobody knows the Services");
    Ok(read?.into_iter().map(serde_json::from_value).collect::<Result<_, _>>()?)
}

/// Prints rows that come or change, until an error or a signal ends it.
async fn follow<T: Row>(arguments: &GetArguments, first: &[T]) -> anyhow::Result<()> {
    let mut before = texts(first)?;
    loop {
        stdout().flush()?;
        sleep(WATCH_PERIOD).await;
        let rows: Vec<T> = read(arguments).await?;
        let now = texts(&rows)?;
        let known: HashSet<&str> = before.iter().map(String::as_str).collect();
        let changed = rows.into_iter().zip(&now).filter(|(_, text)| !known.contains(text.as_str()));
        let changed: Vec<T> = changed.map(|(row, _)| row).collect();
        match &arguments.output {
            _ if changed.is_empty() => {}
            Output::Table => table(&changed, false, false, &mut stdout().lock())?,
            Output::Wide => table(&changed, true, false, &mut stdout().lock())?,
            output => print(output, arguments.resource.kind(), &changed, &mut stdout().lock())?,
        }
        before = now;
    }
}

fn texts<T: Row>(rows: &[T]) -> serde_json::Result<Vec<String>> {
    rows.iter().map(serde_json::to_string).collect()
}

async fn explain(arguments: &ExplainArguments) -> anyhow::Result<ExitCode> {
    let explanation = if let Some(node) = &arguments.offline {
        offline::explained(node, &arguments.question).await?
    } else {
        let mut answer = Client::connect().await?.explain(&arguments.question, arguments.check).await?;
        answer.others = others::rules(&answer).await;
        answer
    };
    print_one(&arguments.output, "Explanation", &explanation, &mut stdout().lock())?;
    let differs = explanation.check.is_some_and(|check| !check.differences.is_empty());
    Ok(if differs { ExitCode::from(DIFFERS) } else { ExitCode::SUCCESS })
}
