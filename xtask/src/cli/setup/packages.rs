//! Chooses the packages to install. Pure: what is missing and what apt has are arguments.

use super::apt::{Package, Packages};
use super::tools::Tool;
use xtask::search;
use xtask::toolchain::BPF_LINKER_LLVMS;

/// The packages of a compiler and of its library's source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CompilerPackages {
    pub(crate) compiler: String,
    pub(crate) source: String,
}

/// Returns the compilers of distributions: Debian's for browsers, which is new; the default one;
/// Ubuntu's by release.
pub(crate) fn compilers() -> Vec<CompilerPackages> {
    let pair =
        |compiler: &str, source: &str| CompilerPackages { compiler: compiler.into(), source: source.into() };
    let mut pairs = vec![pair("rustc-web", "rust-web-src"), pair("rustc", "rust-src")];
    let releases = (95..120).rev();
    pairs.extend(releases.map(|minor| pair(&format!("rustc-1.{minor}"), &format!("rust-1.{minor}-src"))));
    pairs
}

/// Returns the libraries that a bpf-linker with this LLVM version needs.
pub(crate) fn linker_libraries(llvm: u32) -> Vec<String> {
    vec![
        format!("llvm-{llvm}-dev"),
        format!("libpolly-{llvm}-dev"),
        "libzstd-dev".into(),
        "zlib1g-dev".into(),
    ]
}

/// Returns every package that setup may need.
pub(crate) fn all(tools: &[Tool]) -> Vec<String> {
    let compilers = compilers().into_iter().flat_map(|pair| [pair.compiler, pair.source]);
    let libraries = BPF_LINKER_LLVMS.flat_map(linker_libraries);
    compilers.chain(libraries).chain(of_tools(tools)).collect()
}

/// Returns every package that may contain one of these tools.
pub(crate) fn of_tools(tools: &[Tool]) -> Vec<String> {
    tools
        .iter()
        .flat_map(|tool| tool.packages.iter().copied().flatten())
        .map(|&name| name.to_owned())
        .collect()
}

/// Returns the first compiler that is new enough and has its source in the same version. An
/// installed one is preferred.
pub(crate) fn compiler(packages: &Packages, oldest: (u32, u32)) -> Option<CompilerPackages> {
    let fits = |pair: &CompilerPackages| {
        let compiler = wanted(packages, &pair.compiler)?;
        let source = packages.get(&pair.source)?.candidate.as_deref()?;
        (compiler == source && release(compiler)? >= oldest).then_some(())
    };
    let mut fitting: Vec<CompilerPackages> =
        compilers().into_iter().filter(|pair| fits(pair).is_some()).collect();
    fitting.sort_by_key(|pair| !is_installed(packages, &pair.compiler));
    fitting.into_iter().next()
}

/// Returns true if everything that a bpf-linker with this LLVM needs is installed or available.
pub(crate) fn can_link(packages: &Packages, llvm: u32) -> bool {
    BPF_LINKER_LLVMS.contains(&llvm)
        && linker_libraries(llvm).iter().all(|name| wanted(packages, name).is_some())
}

/// Returns the packages that contain a tool.
pub(crate) fn tool(packages: &Packages, tool: &Tool) -> Option<Vec<String>> {
    let has_all = |list: &&&[&str]| list.iter().all(|name| wanted(packages, name).is_some());
    let list = tool.packages.iter().find(has_all)?;
    Some(list.iter().map(|&name| name.to_owned()).collect())
}

/// Returns those of `names` that are not installed, without duplicates.
pub(crate) fn missing(packages: &Packages, names: Vec<String>) -> Vec<String> {
    search::unique(names.into_iter().filter(|name| !is_installed(packages, name)))
}

fn is_installed(packages: &Packages, name: &str) -> bool {
    packages.get(name).is_some_and(|package| package.installed.is_some())
}

/// Returns the version after an install. An installed package is not upgraded.
fn wanted<'a>(packages: &'a Packages, name: &str) -> Option<&'a str> {
    let Package { installed, candidate } = packages.get(name)?;
    installed.as_deref().or(candidate.as_deref())
}

/// Returns major and minor version of a Debian version like "1.96.0+dfsg1-1~deb12u2".
fn release(version: &str) -> Option<(u32, u32)> {
    let upstream = version.rsplit(':').next()?;
    let mut numbers = upstream.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::super::tools::TOOLS;
    use super::*;

    fn apt(lines: &[(&str, Option<&str>, &str)]) -> Packages {
        let package = |&(name, installed, candidate): &(&str, Option<&str>, &str)| {
            let package =
                Package { installed: installed.map(str::to_owned), candidate: Some(candidate.to_owned()) };
            (name.to_owned(), package)
        };
        lines.iter().map(package).collect()
    }

    const WEB: &str = "1.96.0+dfsg1-1~deb12u2";

    #[test]
    fn debian_12_uses_the_compiler_for_browsers() {
        let packages = apt(&[
            ("rustc-web", None, WEB),
            ("rust-web-src", None, WEB),
            ("rustc", None, "1.63.0+dfsg1-2"),
            ("rust-src", None, "1.63.0+dfsg1-2"),
        ]);
        assert_eq!(compiler(&packages, (1, 95)).unwrap().compiler, "rustc-web");
    }

    #[test]
    fn ubuntu_uses_its_newest_release() {
        let packages = apt(&[
            ("rustc", None, "1.75.0+dfsg0ubuntu1"),
            ("rust-src", None, "1.75.0+dfsg0ubuntu1"),
            ("rustc-1.95", None, "1.95.0+dfsg-0ubuntu1"),
            ("rust-1.95-src", None, "1.95.0+dfsg-0ubuntu1"),
            ("rustc-1.96", None, "1.96.0+dfsg-0ubuntu1"),
            ("rust-1.96-src", None, "1.96.0+dfsg-0ubuntu1"),
        ]);
        assert_eq!(compiler(&packages, (1, 95)).unwrap().source, "rust-1.96-src");
    }

    #[test]
    fn installed_compiler_is_preferred() {
        let packages = apt(&[
            ("rustc-web", None, WEB),
            ("rust-web-src", None, WEB),
            ("rustc", Some("1.95.0+dfsg1-1"), "1.95.0+dfsg1-1"),
            ("rust-src", None, "1.95.0+dfsg1-1"),
        ]);
        assert_eq!(compiler(&packages, (1, 95)).unwrap().compiler, "rustc");
    }

    #[test]
    fn old_compilers_and_sources_of_another_version_are_refused() {
        let old = apt(&[("rustc", None, "1.85.0+dfsg3-1"), ("rust-src", None, "1.85.0+dfsg3-1")]);
        assert_eq!(compiler(&old, (1, 95)), None);
        let apart = apt(&[("rustc-web", Some("1.95.0-1"), WEB), ("rust-web-src", None, WEB)]);
        assert_eq!(compiler(&apart, (1, 95)), None);
    }

    #[test]
    fn linker_needs_an_llvm_of_apt_and_of_bpf_linker() {
        let libraries =
            ["llvm-22-dev", "libpolly-22-dev", "libzstd-dev", "zlib1g-dev", "llvm-14-dev", "libpolly-14-dev"];
        let packages = apt(&libraries.map(|name| (name, None, "1")));
        assert!(can_link(&packages, 22));
        assert!(!can_link(&packages, 23), "apt has no llvm-23-dev");
        assert!(!can_link(&packages, 14), "bpf-linker has no feature for LLVM 14");
    }

    #[test]
    fn a_tool_comes_from_the_first_packages_that_all_exist() {
        let bpftool = &TOOLS[0];
        let ubuntu = apt(&[("linux-tools-common", None, "6.8"), ("linux-tools-generic", None, "6.8")]);
        assert_eq!(tool(&ubuntu, bpftool).unwrap(), ["linux-tools-common", "linux-tools-generic"]);
        let debian = apt(&[("bpftool", None, "7.1")]);
        assert_eq!(tool(&debian, bpftool).unwrap(), ["bpftool"]);
        assert_eq!(tool(&Packages::new(), bpftool), None);
    }

    #[test]
    fn installed_packages_and_repetitions_are_left_out() {
        let packages = apt(&[("a", Some("1"), "1"), ("b", None, "1")]);
        assert_eq!(missing(&packages, vec!["a".into(), "b".into(), "b".into()]), ["b"]);
    }

    #[test]
    fn release_is_read_with_and_without_epoch() {
        assert_eq!(release("1:22.1.8-1~deb12u1"), Some((22, 1)));
        assert_eq!(release(WEB), Some((1, 96)));
        assert_eq!(release("unknown"), None);
    }
}
