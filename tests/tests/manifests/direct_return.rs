//! Checks the rights for direct server return: they are for one annotation of one Node.

use std::fs;

use k8s_openapi::api::{
    admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding},
    core::v1::ServiceAccount,
    rbac::v1::{ClusterRole, ClusterRoleBinding},
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{allowed, deploy, documents, has_known_fields, object};

/// Returns the objects of the component.
fn component() -> Vec<Value> {
    documents(&fs::read_to_string(deploy().join("components/dsr/rbac.yaml")).expect("text"))
}

fn of_component<T: DeserializeOwned>(kind: &str) -> T {
    let found = component().into_iter().find(|object| object["kind"] == kind).expect(kind);
    serde_json::from_value(found).expect(kind)
}

#[test]
fn objects_of_the_component_have_only_fields_that_kubernetes_knows() {
    assert!(component().iter().all(has_known_fields));
}

#[test]
fn the_right_to_patch_nodes_goes_with_a_policy_for_the_same_account() {
    let role: ClusterRole = of_component("ClusterRole");
    assert_eq!(allowed(role.rules), ["/nodes: patch"]);
    let binding: ClusterRoleBinding = of_component("ClusterRoleBinding");
    assert_eq!(Some(&binding.role_ref.name), role.metadata.name.as_ref());
    let [subject] = &binding.subjects.expect("subjects")[..] else { panic!("one subject") };
    let account: ServiceAccount = object("ServiceAccount");
    assert_eq!(Some(&subject.name), account.metadata.name.as_ref());
    assert_eq!(subject.namespace, account.metadata.namespace);
    let policy: ValidatingAdmissionPolicy = of_component("ValidatingAdmissionPolicy");
    let bound: ValidatingAdmissionPolicyBinding = of_component("ValidatingAdmissionPolicyBinding");
    assert_eq!(bound.spec.policy_name, policy.metadata.name.expect("a name"));
    assert_eq!(bound.spec.validation_actions, ["Deny"]);
    let spec = policy.spec.expect("a spec");
    assert_eq!(spec.failure_policy.as_deref(), Some("Fail"));
    let [condition] = &spec.match_conditions.expect("conditions")[..] else { panic!("one condition") };
    let namespace = subject.namespace.as_deref().expect("a namespace");
    let user = format!("request.userInfo.username == 'system:serviceaccount:{namespace}:{}'", subject.name);
    assert_eq!(condition.expression, user);
}
