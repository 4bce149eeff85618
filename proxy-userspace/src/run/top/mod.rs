//! `shunt top`: prints one reading, or shows a live table on the terminal.

#[cfg(feature = "live-top")]
mod live;

use std::{
    io::{self, IsTerminal as _, Write as _, stdin, stdout},
    process::ExitCode,
};

use proxy_userspace::{
    inspect,
    top::{Rows, Sampler, TopArguments, TopRow, sort_and_filter},
};
use tokio::{runtime, time::sleep};

#[cfg(feature = "live-top")]
use self::live::show;
use super::{
    standard_error::tell,
    verbs::{WRONG_USAGE, is_broken_pipe, tell_error},
};

/// Runs `shunt top` to its end.
pub(crate) fn top(arguments: &TopArguments) -> ExitCode {
    let has_terminal = stdin().is_terminal() && stdout().is_terminal();
    if !(arguments.once || has_terminal) {
        tell("the live table needs a terminal (kubectl exec --stdin --tty): use --once for one reading");
        return ExitCode::from(WRONG_USAGE);
    }
    let runtime = match runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&anyhow::Error::new(error).context("cannot start the runtime")),
    };
    let done = if arguments.once {
        runtime.block_on(print_once(arguments)).map(|()| ExitCode::SUCCESS)
    } else {
        runtime.block_on(show(arguments))
    };
    match done {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

fn failed(error: &anyhow::Error) -> ExitCode {
    tell_error(error);
    ExitCode::FAILURE
}

async fn print_once(arguments: &TopArguments) -> anyhow::Result<()> {
    let mut sampler = Sampler::default();
    let (view, service) = (arguments.view, arguments.service.as_ref());
    let mut sample = sampler.sample(view, service).await?;
    if view.has_rates() {
        sleep(arguments.interval).await;
        sample = sampler.sample(view, service).await?;
    }
    match sample.rows {
        Rows::Services(rows) => print(arguments, rows)?,
        Rows::Endpoints(rows) => print(arguments, rows)?,
        Rows::Maps(rows) => print(arguments, rows)?,
        Rows::Programs(rows) => print(arguments, rows)?,
    }
    Ok(stdout().flush()?)
}

fn print<T: TopRow>(arguments: &TopArguments, rows: Vec<T>) -> io::Result<()> {
    let order = sort_and_filter(&rows, arguments.sorting, &arguments.filter);
    let mut rows: Vec<Option<T>> = rows.into_iter().map(Some).collect();
    let sorted: Vec<T> = order.into_iter().filter_map(|index| rows[index].take()).collect();
    inspect::print(&arguments.output, arguments.view.kind(), &sorted, &mut stdout().lock())
}

/// Fails: the live table is missing.
#[cfg(not(feature = "live-top"))]
#[expect(clippy::unused_async, reason = "with the feature, it waits")]
async fn show(_: &TopArguments) -> anyhow::Result<ExitCode> {
    anyhow::bail!("this shunt was built without the feature live-top: use --once for one reading")
}
