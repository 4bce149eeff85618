//! Runs one fuzz target: with coverage in a build of `cargo xtask fuzz`, otherwise on the files
//! that are given.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
mod coverage {
    use std::sync::LazyLock;

    use libfuzzer_sys::fuzz_target;
    use shunt_fuzz::Target;

    /// The name of the target. libFuzzer owns the command line.
    const VARIABLE: &str = "SHUNT_FUZZ_TARGET";

    static TARGET: LazyLock<Target> = LazyLock::new(|| {
        let name = std::env::var_os(VARIABLE).and_then(|name| name.into_string().ok());
        name.and_then(|name| Target::named(&name)).unwrap_or_else(|| panic!("{VARIABLE} names no target"))
    });

    fuzz_target!(|input: &[u8]| (TARGET.run)(input));
}

#[cfg(not(fuzzing))]
fn main() -> anyhow::Result<()> {
    use anyhow::Context as _;

    let mut arguments = std::env::args_os().skip(1);
    let name = arguments.next().context("usage: fuzz TARGET FILE...")?.to_string_lossy().into_owned();
    let target = shunt_fuzz::Target::named(&name).with_context(|| format!("{name} is not a target"))?;
    for path in arguments {
        let path = std::path::PathBuf::from(path);
        let input = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        println!("{}", path.display());
        (target.run)(&input);
    }
    Ok(())
}
