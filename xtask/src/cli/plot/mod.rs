//! `cargo xtask bench --plot`: measures clusters of several sizes in two modes, and draws curves
//! into `docs/curves`.

mod charts;
mod draw;
mod figures;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use xtask::workspace;

use self::figures::Figures;
use super::{Bench, steps};

const MODES: [&str; 2] = ["ebpf", "nftables"];
/// The numbers of Services, if the command line has none.
const SIZES: [usize; 4] = [10, 1_000, 10_000, 30_000];
/// The parts of the benchmark that depend on the number of Services.
const PARTS: [&str; 3] = ["changes", "memory", "restart"];
/// The time limit of a mode. On two cores without other load it takes about three minutes.
const LIMIT: Duration = Duration::from_mins(10);

/// Measures all modes, then replaces the figures and curves in `docs/curves`. A broken promise of
/// `--check` is an error after that.
pub(crate) fn run(what: &Bench) -> Result<()> {
    let measured: Vec<Result<()>> = MODES.iter().map(|mode| measure(what, mode)).collect();
    let measured: Result<()> = measured.into_iter().collect();
    // A mode that failed before its end has no figures. The documents then stay as they are.
    if MODES.iter().all(|mode| measured_figures(mode).exists()) {
        fs::create_dir_all(folder()).with_context(|| format!("cannot create {}", folder().display()))?;
        for mode in MODES {
            let from = measured_figures(mode);
            fs::copy(&from, committed_figures(mode))
                .with_context(|| format!("cannot copy {}", from.display()))?;
        }
        redraw()?;
    }
    measured
}

/// Draws the curves again from the figures in `docs/curves`.
pub(crate) fn redraw() -> Result<()> {
    for (name, svg) in curves()? {
        let path = folder().join(name);
        fs::write(&path, svg).with_context(|| format!("cannot write {}", path.display()))?;
        println!("{}", path.display());
    }
    Ok(())
}

/// Returns the name and the content of each file with curves.
fn curves() -> Result<Vec<(String, String)>> {
    let figures: Vec<Figures> =
        MODES.iter().map(|mode| read(&committed_figures(mode))).collect::<Result<_>>()?;
    let charts = charts::all(&figures).into_iter();
    charts.map(|chart| Ok((format!("{}.svg", chart.name), draw::draw(&chart)?))).collect()
}

fn measure(what: &Bench, mode: &str) -> Result<()> {
    let json = measured_figures(mode);
    // Figures of an earlier run must not pass for those of this one.
    if json.exists() {
        fs::remove_file(&json).with_context(|| format!("cannot remove {}", json.display()))?;
    }
    let services = if what.services.is_empty() { SIZES.to_vec() } else { what.services.clone() };
    let what =
        Bench { mode: mode.to_owned(), services, only: PARTS.map(str::to_owned).to_vec(), ..what.clone() };
    steps::bench(&what, &json).limit(LIMIT).show()
}

fn read(path: &Path) -> Result<Figures> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("cannot read the figures in {}", path.display()))
}

fn measured_figures(mode: &str) -> PathBuf {
    workspace::target().join(format!("bench-curves-{mode}.json"))
}

fn committed_figures(mode: &str) -> PathBuf {
    folder().join(format!("{mode}.json"))
}

fn folder() -> PathBuf {
    workspace::root().join("docs/curves")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_of_the_documents_are_those_of_their_figures() {
        for (name, svg) in curves().unwrap() {
            let drawn = fs::read_to_string(folder().join(&name)).unwrap_or_default();
            assert_eq!(drawn, svg, "{name} is old: run `cargo xtask bench --plot=redraw`");
        }
    }
}
