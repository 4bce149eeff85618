//! kubeconfig files, with the URL of the proxy.

use proxy_userspace::watch::describe_kubeconfig;

use crate::scratch;

pub(crate) fn run(input: &[u8]) {
    let path = scratch::file_with(input);
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    // An error is a good result.
    drop(runtime.block_on(describe_kubeconfig(&path)));
}
