//! shunt's test world: hosts as network namespaces, the conformance runner, the demo, the
//! benchmark, and an API server for tests.

pub mod agent;
pub mod apiserver;
pub mod bench;
pub mod case;
pub mod deadline;
pub mod explained;
pub mod flood;
pub mod flow;
pub mod interrupt;
pub mod kube_proxy;
pub mod planned;
pub mod process;
pub mod resolved;
pub mod runner;
pub mod scenarios;
pub mod slow_commands;
pub mod small_cluster;
pub mod system_calls;
pub mod traffic;
pub mod world;
